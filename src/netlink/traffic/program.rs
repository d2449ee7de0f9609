//! Filters of traffic control that select packets by a program of classic BPF, and redirect them.

#[cfg(test)]
mod tests;

use nix::errno::Errno;
use nix::libc::{RTM_GETTFILTER, RTM_NEWTFILTER, TCA_KIND, TCA_OPTIONS};
use rtnetlink::packet_core::NLM_F_CREATE;

use super::super::Netlink;
use super::super::attribute::{ReplyAttribute, find_attribute, read_u32_at};
use super::super::error::{NetlinkResult, unless_absent};
use super::{ALL_PROTOCOLS, TrafficHandle, TrafficHeader, redirected_link, write_redirect};

const KIND: &str = "bpf";
/// `TCA_BPF_*` of `linux/pkt_cls.h`.
const TCA_BPF_OPS_LEN: u16 = 4;
const TCA_BPF_OPS: u16 = 5;
const TCA_BPF_ACT: u16 = 1;
const TCA_BPF_FLAGS: u16 = 8;
/// `TCA_BPF_FLAG_ACT_DIRECT`: the program returns a `TC_ACT_*`.
const ACT_DIRECT: u32 = 1;
/// The handles of the program, and of the one that is run first, among the filters of their
/// priority.
const HANDLE: u32 = 1;
const FIRST_HANDLE: u32 = 2;
/// What a program without redirect returns: the packet is dropped; the next filter is asked.
pub const TC_ACT_SHOT: u32 = 2;
pub const TC_ACT_UNSPEC: u32 = u32::MAX;
/// Length of an instruction in bytes.
const INSTRUCTION: usize = 8;

/// An instruction of classic BPF, as in `linux/filter.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClassicInstruction {
    /// `BPF_*` of `linux/bpf_common.h`.
    pub code: u16,
    /// The number of instructions that are skipped if the condition holds.
    pub jt: u8,
    /// The number of instructions that are skipped if the condition does not hold.
    pub jf: u8,
    /// The operand.
    pub k: u32,
}

impl ClassicInstruction {
    fn to_bytes(self) -> [u8; INSTRUCTION] {
        let ([c0, c1], [k0, k1, k2, k3]) = (self.code.to_ne_bytes(), self.k.to_ne_bytes());
        [c0, c1, self.jt, self.jf, k0, k1, k2, k3]
    }

    fn parse_bytes(bytes: &[u8]) -> Option<ClassicInstruction> {
        let code = u16::from_ne_bytes(*bytes.first_chunk()?);
        Some(ClassicInstruction {
            code,
            jt: *bytes.get(2)?,
            jf: *bytes.get(3)?,
            k: read_u32_at(bytes, 4)?,
        })
    }
}

/// A program that selects packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramFilter {
    /// Run before `program`, unless it is empty. It returns a `TC_ACT_*`.
    pub first: Vec<ClassicInstruction>,
    /// Run for each packet of any protocol. With `redirect` it returns 1 for selected packets and
    /// 0 for packets that the next filter judges; without, it returns a `TC_ACT_*`. A load
    /// beyond the packet returns 0.
    pub program: Vec<ClassicInstruction>,
    /// The index of the link by which selected packets leave. While that link is gone or down,
    /// they are dropped.
    pub redirect: Option<u32>,
}

impl ProgramFilter {
    /// The handle and the program of a filter in a reply, if it is one that
    /// [`Netlink::replace_program`] makes.
    fn parse_body(body: &[u8]) -> Option<(u32, ProgramFilter)> {
        let (header, kind, attributes) = TrafficHeader::parse_reply(body)?;
        let options = find_attribute(attributes, TCA_OPTIONS).filter(|_| kind == KIND)?;
        let flags =
            options.find_nested(TCA_BPF_FLAGS).and_then(ReplyAttribute::to_u32).unwrap_or_default();
        let code = options.find_nested(TCA_BPF_OPS)?.value;
        let actions = options.find_nested(TCA_BPF_ACT);
        let redirect =
            actions.and_then(|actions| actions.nested_attributes().find_map(redirected_link));
        if redirect.is_some() == (flags & ACT_DIRECT != 0) {
            return None;
        }
        let program =
            code.chunks(INSTRUCTION).map(ClassicInstruction::parse_bytes).collect::<Option<_>>()?;
        Some((header.handle, ProgramFilter { first: Vec::new(), program, redirect }))
    }
}

/// Whether [`Netlink::replace_program`] makes filters with this handle.
pub fn is_program_handle(handle: u32) -> bool {
    [HANDLE, FIRST_HANDLE].contains(&handle)
}

impl Netlink {
    /// Adds a filter with a program to the qdisc or class `parent` of a link, or replaces that
    /// filter without an interval. Fails if the priority has filters of another kind.
    pub fn replace_program(
        &self,
        index: u32,
        parent: TrafficHandle,
        priority: u16,
        filter: &ProgramFilter,
    ) -> NetlinkResult<()> {
        let ProgramFilter { first, program, redirect } = filter;
        let place = TrafficHeader::of_filter(index, parent, priority, ALL_PROTOCOLS);
        self.put_program(TrafficHeader { handle: HANDLE, ..place }, program, *redirect)?;
        if first.is_empty() {
            return Ok(());
        }
        // The kernel asks the latest filter of a priority first.
        self.put_program(TrafficHeader { handle: FIRST_HANDLE, ..place }, first, None)
    }

    fn put_program(
        &self,
        header: TrafficHeader,
        program: &[ClassicInstruction],
        redirect: Option<u32>,
    ) -> NetlinkResult<()> {
        let mut request = header.to_request(RTM_NEWTFILTER);
        let code: Vec<u8> = program.iter().flat_map(|instruction| instruction.to_bytes()).collect();
        let count = u16::try_from(program.len()).unwrap_or(u16::MAX);
        request.body.put_text(TCA_KIND, KIND).put_nested(TCA_OPTIONS, |options| {
            options.put_bytes(TCA_BPF_OPS_LEN, &count.to_ne_bytes()).put_bytes(TCA_BPF_OPS, &code);
            match redirect {
                Some(link) => {
                    options.put_nested(TCA_BPF_ACT, |actions| write_redirect(actions, link))
                }
                None => options.put_u32(TCA_BPF_FLAGS, ACT_DIRECT),
            }
        });
        let op = "set the filter program of";
        let link = self.link_label(header.index);
        let replaced = self.socket.request_change(&request, NLM_F_CREATE, op, &link);
        replaced.map_err(|error| match error.errno() {
            Some(Errno::ENOENT | Errno::EOPNOTSUPP) => error.with_remedy(
                "load the kernel modules \"cls_bpf\" and \"act_mirred\" on the node".to_owned(),
            ),
            _ => error,
        })
    }

    /// The filter that [`Netlink::replace_program`] makes; `None` if there is no such filter or
    /// link.
    pub fn find_program(
        &self,
        index: u32,
        parent: TrafficHandle,
        priority: u16,
    ) -> NetlinkResult<Option<ProgramFilter>> {
        let request = TrafficHeader::of_filter(index, parent, priority, ALL_PROTOCOLS)
            .to_request(RTM_GETTFILTER);
        let list = || {
            self.socket.request_list(
                &request,
                "list the filters of",
                &self.link_label(index),
                ProgramFilter::parse_body,
            )
        };
        let found = match list() {
            // A long program. The first read has shown the kernel the size of the buffer.
            Err(error) if error.errno() == Some(Errno::EMSGSIZE) => list(),
            found => found,
        };
        let mut found = unless_absent(found, Vec::new())?;
        let first = found.iter().position(|(handle, _)| *handle == FIRST_HANDLE);
        let first = first.map(|at| found.swap_remove(at).1.program).unwrap_or_default();
        let main = found.into_iter().find(|(handle, _)| *handle == HANDLE);
        Ok(main.map(|(_, filter)| ProgramFilter { first, ..filter }))
    }
}
