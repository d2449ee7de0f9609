//! Queueing disciplines: putting one onto a link, reading and removing it.

use nix::errno::Errno;
use nix::libc::{RTM_DELQDISC, RTM_GETQDISC, RTM_NEWQDISC};
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};

use super::super::Netlink;
use super::super::attribute::Attributes;
use super::super::error::Result;
use super::super::link::unless_absent;
use super::super::packet::Attr;
use super::{Handle, Header, TCA_KIND, TCA_OPTIONS};

/// `TC_H_ROOT`
const ROOT: u32 = 0xffff_ffff;
/// `TC_H_INGRESS`, where `clsact` is as well.
const INGRESS: u32 = 0xffff_fff1;

const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;

/// The kernel measures buffers in the time that they take, in ticks of 64 nanoseconds
/// (`/proc/net/psched`, the same since Linux 2.6.31).
pub const TICKS_PER_8_MICROSECONDS: u64 = 125;

/// Where on a link a qdisc is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// What leaves it passes here, and may wait.
    Root,
    /// What comes in passes here, and cannot wait.
    Ingress,
}

impl Hook {
    fn parent(self) -> u32 {
        match self {
            Hook::Root => ROOT,
            Hook::Ingress => INGRESS,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Qdisc {
    /// A token bucket, which shapes everything.
    Tbf(Tbf),
    /// A place for filters of what comes in.
    Ingress,
    /// A place for filters of what comes in and of what leaves, such as eBPF users have.
    Clsact,
    /// Any other, by its name. It cannot be made by that alone.
    Other(String),
}

/// A token bucket: `tc-tbf(8)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tbf {
    pub rate: u64,
    /// The size of the bucket, as the time that filling it takes, in ticks.
    pub buffer: u32,
    /// How many bytes may wait; what comes then is dropped.
    pub limit: u32,
}

/// A qdisc that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QdiscInfo {
    pub handle: Handle,
    pub qdisc: Qdisc,
}

impl Qdisc {
    /// Its kind, such as `tbf`.
    pub fn kind(&self) -> &str {
        match self {
            Qdisc::Tbf(_) => "tbf",
            Qdisc::Ingress => "ingress",
            Qdisc::Clsact => "clsact",
            Qdisc::Other(kind) => kind,
        }
    }

    fn attributes(&self) -> Attributes {
        let mut list = Attributes::new();
        list.text(TCA_KIND, self.kind());
        if let Qdisc::Tbf(tbf) = self {
            list.nest(TCA_OPTIONS, |options| tbf.write(options));
        }
        list
    }
}

impl Tbf {
    fn write(&self, options: &mut Attributes) {
        // `struct tc_tbf_qopt`: two of `tc_ratespec`, with the rate at the end of each.
        let mut parms = vec![0; 8];
        let rate = u32::try_from(self.rate);
        parms.extend_from_slice(&rate.unwrap_or(u32::MAX).to_ne_bytes());
        parms.extend_from_slice(&[0; 12]);
        parms.extend_from_slice(&self.limit.to_ne_bytes());
        parms.extend_from_slice(&self.buffer.to_ne_bytes());
        parms.extend_from_slice(&[0; 4]);
        options.bytes(TCA_TBF_PARMS, &parms);
        if rate.is_err() {
            options.u64(TCA_TBF_RATE64, self.rate);
        }
    }

    fn read(options: Attr<'_>) -> Tbf {
        let mut tbf = Tbf { rate: 0, buffer: 0, limit: 0 };
        let mut rate64 = None;
        for attr in options.nested() {
            let word = |at: usize| {
                let bytes = attr.value.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
                bytes.map(u32::from_ne_bytes).unwrap_or_default()
            };
            match attr.kind {
                TCA_TBF_PARMS => {
                    tbf = Tbf { rate: word(8).into(), limit: word(24), buffer: word(28) };
                }
                TCA_TBF_RATE64 => rate64 = attr.u64(),
                _ => {}
            }
        }
        Tbf { rate: rate64.unwrap_or(tbf.rate), ..tbf }
    }
}

impl QdiscInfo {
    pub(in crate::netlink) fn read(body: &[u8]) -> Option<QdiscInfo> {
        let (header, attributes) = Header::read(body)?;
        let (mut kind, mut tbf) = (String::new(), None);
        for attr in attributes {
            match attr.kind {
                TCA_KIND => kind = attr.text(),
                TCA_OPTIONS if kind == "tbf" => tbf = Some(Tbf::read(attr)),
                _ => {}
            }
        }
        let qdisc = match (kind.as_str(), tbf) {
            ("tbf", Some(tbf)) => Qdisc::Tbf(tbf),
            ("ingress", _) => Qdisc::Ingress,
            ("clsact", _) => Qdisc::Clsact,
            _ => Qdisc::Other(kind),
        };
        Some(QdiscInfo { handle: Handle(header.handle), qdisc })
    }
}

impl Netlink {
    /// The qdisc of a link; `None` if it has only the kernel's default qdisc.
    pub fn qdisc(&self, index: u32, hook: Hook) -> Result<Option<QdiscInfo>> {
        let header = Header { index, parent: hook.parent(), ..Header::default() };
        let message = header.message(RTM_GETQDISC, Attributes::new());
        match self.ack_and_echo(message, 0) {
            Ok(body) => {
                let there = body.and_then(|body| QdiscInfo::read(&body));
                Ok(there.filter(|info| info.handle != Handle::default()))
            }
            Err(failure) if failure.errno == Errno::ENOENT => Ok(None),
            Err(failure) => Err(failure.doing("look up the qdisc of", || self.label(index))),
        }
    }

    /// Replaces the qdisc of a link; a qdisc of the same kind and handle is changed in place.
    pub fn replace_qdisc(
        &self,
        index: u32,
        hook: Hook,
        handle: Handle,
        qdisc: &Qdisc,
    ) -> Result<()> {
        self.new_qdisc(index, hook, handle, qdisc, NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Adds a qdisc where there is only the kernel's default qdisc.
    pub fn add_qdisc(&self, index: u32, hook: Hook, handle: Handle, qdisc: &Qdisc) -> Result<()> {
        self.new_qdisc(index, hook, handle, qdisc, NLM_F_CREATE | NLM_F_EXCL)
    }

    fn new_qdisc(
        &self,
        index: u32,
        hook: Hook,
        handle: Handle,
        qdisc: &Qdisc,
        bits: u16,
    ) -> Result<()> {
        let header = Header { index, handle: handle.0, parent: hook.parent(), info: 0 };
        let message = header.message(RTM_NEWQDISC, qdisc.attributes());
        self.ack(message, bits).map_err(|failure| {
            let lacks_driver = matches!(failure.errno, Errno::ENOENT | Errno::EOPNOTSUPP);
            let target = || format!("{} to {}", qdisc.kind(), self.label(index));
            let error = failure.doing("add qdisc", target);
            if lacks_driver {
                let module = format!("sch_{}", qdisc.kind());
                return error.with_remedy(format!("load the kernel module {module:?} on the node"));
            }
            error
        })
    }

    /// Removes the qdisc of a link, with its filters; `false` if there was none but the kernel's.
    pub fn del_qdisc(&self, index: u32, hook: Hook) -> Result<bool> {
        let header = Header { index, parent: hook.parent(), ..Header::default() };
        let message = header.message(RTM_DELQDISC, Attributes::new());
        let deleted = self.ack(message, 0);
        if deleted.as_ref().is_err_and(|failure| failure.errno == Errno::EINVAL) {
            // That is what the kernel says where there never was one at the hook.
            return Ok(false);
        }
        unless_absent(deleted.map_err(|f| f.doing("delete the qdisc of", || self.label(index))))
    }
}
