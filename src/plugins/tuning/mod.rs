//! tuning: kernel parameters, MAC, MTU, modes and transmit queue of the container's interface.
//!
//! It stands behind an interface plugin in a list and passes `prevResult` on, with the MAC and MTU
//! that it set. Keys: `sysctl`, an object set in its order, `IFNAME` in a key being the interface;
//! `mac`, `mtu`, `promisc`, `allmulti`, `txQLen`; all of them in `args.cni` as well, the MAC in
//! `CNI_ARGS` and `runtimeConfig`; `dataDir`; `profile`, of which there is `safe`. What the node's
//! `/etc/cni/tuning/allowlist.conf` does not match is refused.
//!
//! On the host it leaves a file below `dataDir` with what DEL has to restore. Kernel parameters
//! are not restored: they end with the namespace.

mod attributes;
mod backup;
mod permission;
mod sysctls;

use std::path::Path;

use serde::Deserialize;

use self::attributes::Attributes;
use self::backup::Backup;
use self::permission::Profile;
use self::sysctls::{Parameter, Sysctls};
use crate::attachment::Owner;
use crate::attachment::backup::{self as files, BackupFile};
use crate::cni::{CniResult, IfName, Interface};
use crate::error::{Context, Error, Result};
use crate::iface::mtu;
use crate::log;
use crate::netlink::{Link, Mac, Netlink};
use crate::netns::Netns;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks, Rollback, require_prev};

#[derive(Debug)]
pub struct Tuning;

/// The keys of the plugin.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// Kernel parameters below `net`, set in this order. `IFNAME` is the interface.
    sysctl: Sysctls,
    mac: String,
    /// `true` makes the interface promiscuous; `false` is only verified.
    promisc: Option<bool>,
    /// The MTU; 0 leaves it.
    mtu: i64,
    /// Whether the interface receives every multicast. Default: left.
    allmulti: Option<bool>,
    /// The length of the transmit queue. Default: left.
    #[serde(rename = "txQLen")]
    txqlen: Option<i64>,
    /// The folder of backups. Default: `/run/cni/tuning`.
    data_dir: String,
    /// `safe` refuses all but a few parameters. Default: the allowlist decides.
    profile: String,
    runtime_config: RuntimeConfig,
    args: Args,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    mac: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: CniArgs,
}

/// Keys of the configuration that are given for one container. What is present counts, be it 0.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CniArgs {
    sysctl: Sysctls,
    mac: Option<String>,
    promisc: Option<bool>,
    mtu: Option<i64>,
    allmulti: Option<bool>,
    #[serde(rename = "txQLen")]
    txqlen: Option<i64>,
}

impl Conf {
    fn dir(&self) -> &Path {
        Path::new(if self.data_dir.is_empty() { "/run/cni/tuning" } else { &self.data_dir })
    }

    /// The attributes; `args` overrides the configuration, and the MAC has further sources.
    fn attributes(&self, cx: &Cx<'_>) -> Result<Attributes> {
        let args = &self.args.cni;
        let from_env =
            cx.args(&["MAC"])?.get("MAC", |text| Ok(text.to_owned()))?.unwrap_or_default();
        let mut macs = [&self.runtime_config.mac, &from_env, &self.mac].into_iter();
        let mac = args.mac.as_ref().or_else(|| macs.find(|mac| !mac.is_empty()));
        let txqlen = args.txqlen.or(self.txqlen).map(|length| {
            let refused = || Error::config(format!("txQLen {length} is no length of a queue"));
            u32::try_from(length).map_err(|_| refused())
        });
        Ok(Attributes {
            mac: mac.filter(|mac| !mac.is_empty()).map(|mac| parse_mac(mac)).transpose()?,
            promisc: args.promisc.or(self.promisc),
            mtu: Some(mtu::bytes(args.mtu.unwrap_or(self.mtu))?).filter(|mtu| *mtu > 0),
            allmulti: args.allmulti.or(self.allmulti),
            txqlen: txqlen.transpose()?,
        })
    }
}

fn parse_mac(text: &str) -> Result<Mac> {
    text.parse().map_err(|e| {
        Error::config(format!("invalid args {text} for MAC addr: {e}"))
            .with_details("write six bytes, as in 02:00:00:00:00:01")
    })
}

impl Plugin for Tuning {
    const NAME: &'static str = "tuning";
    const ABOUT: &'static str = "tunes the container's interface and its kernel parameters";
    type Conf = Conf;

    fn examine(cx: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        Wanted::resolve(cx, conf, &IfName::parse("eth0")?).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let wanted = Wanted::resolve(cx, conf, &req.ifname)?;
        permission::check_allowlist(&wanted.parameters)?;
        let mut result = require_prev(req.prev.as_ref(), "Required prevResult missing")?.clone();
        let netns = req.sandbox.netns()?;
        wanted.refuse_the_nodes_namespace(netns)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let (file, ifname) = (BackupFile::new(conf.dir(), &owner), &req.ifname);
        netns.run(|| wanted.apply(ifname, &file, &owner))??;
        let name = req.ifname.as_str();
        let own = |i: &&mut Interface| i.name == name && !i.sandbox.is_empty();
        for interface in result.interfaces.iter_mut().filter(own) {
            if let Some(mac) = wanted.attributes.mac {
                interface.mac = mac.to_string();
            }
            if let Some(mtu) = wanted.attributes.mtu {
                interface.mtu = cx.reported_mtu(mtu);
            }
        }
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let wanted = Wanted::resolve(cx, conf, &req.ifname)?;
        req.require_prev()?;
        let ifname = &req.ifname;
        req.sandbox.netns()?.run(|| wanted.verify(ifname))?
    }

    /// A later plugin's DEL removes the interface: it must not be kept from that for ever by an
    /// attribute that cannot be restored. What fails is told, and tried once more.
    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let file = BackupFile::new(conf.dir(), &owner);
        let mut backup = match Backup::read(&file) {
            Ok(Some(backup)) if !backup.may_be_of(&owner) => return Ok(()),
            Ok(backup) => backup,
            Err(error) => {
                log::warn(format_args!("\"{}\" stays as it is: {error}", req.ifname));
                None
            }
        };
        if let (Some(netns), Some(backup)) = (&req.netns, backup.as_mut()) {
            let restored = netns.run(|| restore(&req.ifname, &backup.original));
            let restored = restored.unwrap_or_else(|e| Err(e.into()));
            if let Err(error) = restored.context(|| format!("restore \"{}\"", req.ifname)) {
                if !backup.tried {
                    backup.tried = true;
                    backup.write(&file)?;
                    return Err(error.with_details("the next DEL tries once more"));
                }
                log::warn(error);
            }
        }
        Ok(file.remove()?)
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let valid = Owner::each(&cx.net.name, &req.valid);
        Backup::collect(conf.dir(), cx.net.name.as_str(), &valid)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let usable = || -> Result<()> {
            let ifname = IfName::parse("eth0")?;
            let wanted = Wanted::resolve(cx, conf, &ifname)?;
            permission::check_allowlist(&wanted.parameters)?;
            if !wanted.attributes.is_empty() {
                files::require_writable(conf.dir())?;
            }
            Ok(cx.host()?.require_admin()?)
        };
        usable().or_unavailable()
    }
}

/// What is to be set.
struct Wanted {
    profile: Profile,
    parameters: Vec<Parameter>,
    attributes: Attributes,
}

impl Wanted {
    fn resolve(cx: &Cx<'_>, conf: &Conf, ifname: &IfName) -> Result<Wanted> {
        let profile = Profile::parse(&conf.profile)?;
        let mut parameters = conf.sysctl.resolve(&conf.args.cni.sysctl, ifname)?;
        profile.restrict(&mut parameters, ifname)?;
        Ok(Wanted { profile, parameters, attributes: conf.attributes(cx)? })
    }

    /// What is safe in a container's namespace is not in the node's.
    fn refuse_the_nodes_namespace(&self, netns: &Netns) -> Result<()> {
        let unsafe_there = self.profile == Profile::Safe && !self.parameters.is_empty();
        if unsafe_there && Netns::current()?.same_as(netns)? {
            return Err(Error::config(
                "the profile \"safe\" sets no sysctl in the network namespace of the node",
            ));
        }
        Ok(())
    }

    /// Sets everything in the calling thread's namespace, or changes nothing.
    fn apply(&self, ifname: &IfName, file: &BackupFile, owner: &Owner<'_>) -> Result<()> {
        // Only switching it on is a change of ours.
        let promisc = self.attributes.promisc.filter(|on| *on);
        let attributes = Attributes { promisc, ..self.attributes.clone() };
        let parameters: Vec<_> =
            self.parameters.iter().map(Parameter::find).collect::<Result<_>>()?;
        let link = if attributes.is_empty() { None } else { Some(open(ifname)?) };

        let mut undo = Rollback::new();
        for parameter in &parameters {
            undo.push(format!("set {} back", parameter.key), || parameter.put_back());
            parameter.write()?;
        }
        if let Some((netlink, link)) = &link {
            let now = Attributes::of(link, &attributes);
            back_up(file, owner, &now, &attributes, &mut undo)?;
            undo.push(format!("restore {ifname:?}"), move || {
                Error::join(now.restore(netlink, link)).map_or(Ok(()), Err)
            });
            attributes.set(netlink, link).context(|| format!("tune \"{ifname}\""))?;
        }
        undo.commit();
        Ok(())
    }

    /// Compares with the attributes and parameters of the calling thread's namespace.
    fn verify(&self, ifname: &IfName) -> Result<()> {
        for parameter in &self.parameters {
            parameter.find()?.verify()?;
        }
        let link = Netlink::open()?.link(ifname.as_str())?;
        let missing = || Error::internal(format!("Cannot find container link {ifname}"));
        self.attributes.verify(&link.ok_or_else(missing)?, ifname)
    }
}

/// The interface, and netlink in the calling thread's namespace.
fn open(ifname: &IfName) -> Result<(Netlink, Link)> {
    let netlink = Netlink::open()?;
    let missing = || Error::internal(format!("failed to get \"{ifname}\": Link not found"));
    let link = netlink.link(ifname.as_str())?.ok_or_else(missing)?;
    Ok((netlink, link))
}

/// Keeps what the interface is like `now` for DEL; a failing ADD leaves the file as it was.
fn back_up<'a>(
    file: &'a BackupFile,
    owner: &Owner<'_>,
    now: &Attributes,
    wanted: &Attributes,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    let earlier = Backup::read(file).unwrap_or_else(|error| {
        log::warn(format_args!("a backup is replaced: {error}"));
        None
    });
    let earlier = earlier.filter(|backup| backup.may_be_of(owner));
    let former = file.read()?;
    undo.push("put the backup back", move || {
        let put = former.map_or_else(|| file.remove(), |content| file.write(&content));
        Ok(put?)
    });
    Backup::renewed(earlier, owner, now, wanted).write(file)
}

/// Restores the interface's original attributes, in the calling thread's namespace.
fn restore(ifname: &IfName, original: &Attributes) -> Result<()> {
    let netlink = Netlink::open()?;
    let Some(link) = netlink.link(ifname.as_str())? else { return Ok(()) };
    Error::join(original.restore(&netlink, &link)).map_or(Ok(()), Err)
}
