//! The internals that the tests, the benchmarks and the fuzz targets of this repository use.

pub use crate::applets::APPLETS;
pub use crate::skel::Kind;

pub mod attachment {
    pub use crate::attachment::{Doubt, Gone, Liveness, Owner, Record};
}

pub mod options {
    pub use crate::options::{Asked, Opt, help, opt, parse, unknown_word, version};
    pub use crate::tool::multicall::of_tools;
}

pub mod netlink {
    pub use crate::netlink::{
        LinkChange, LinkKind, Mac, Netlink, NewAddr, NewLink, Route, RouteMode, Switch, VethPeer,
    };
}

pub mod netns {
    pub use crate::netns::Netns;
    pub use crate::netns::NetnsId;
}

pub mod netfilter {
    pub use crate::netfilter::handover::to_reference;
    pub use crate::netfilter::{Backend, Owner, PacketFilter, Repair, heal};

    pub mod filter {
        pub use crate::netfilter::filter::{Pod, Policy, add};
    }

    pub mod masquerade {
        pub use crate::netfilter::masquerade::{add, check, del, gc};
    }

    pub mod spoof {
        pub use crate::netfilter::spoof::{Port, add};
    }
}

/// For the fuzz targets.
pub mod fuzz {
    pub use crate::cni::args::Args;
    pub use crate::cni::json::{Json, compact, pretty};
    pub use crate::cni::{CniResult, NetConf, SpecVersion};
    pub use crate::leases::fuzz::files;
    pub use crate::netfilter::iptables::Table;
    pub use crate::netlink::fuzz::answers;

    pub mod dhcp {
        pub use crate::dhcp::{machine, record, rpc, timing, v4, v6};
    }
}
