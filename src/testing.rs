//! The internals that the tests, the benchmarks and the fuzz targets of this repository use.

pub use crate::applets::APPLETS;
pub use crate::framework::{Applet, AppletKind};

pub mod attachment {
    pub use crate::attachment::{
        AttachmentId, AttachmentRecord, EndedBy, Liveness, UnknownBecause,
    };
}

pub mod options {
    pub use crate::options::{
        CommandOption, ParsedCommandLine, help_text, long_option, parse_args, unknown_word_error,
        version_text,
    };
    pub use crate::tool::multicall::flags_by_tool;
}

pub mod iface {
    pub use crate::iface::redirect;
    pub use crate::iface::tun::{NewTapDevice, create_device};
}

pub mod netlink {
    pub use crate::netlink::{
        KernelRoute, LinkChange, LinkKind, MacAddress, Netlink, NewLink, NewLinkAddress,
        OnOffSetting, RouteAddMode, VethPeer,
    };
}

pub mod netns {
    pub use crate::netns::Netns;
    pub use crate::netns::NetnsIdentity;
}

pub mod netfilter {
    pub use crate::netfilter::handover::hand_over_to_reference;
    pub use crate::netfilter::reconcile::{ReconcileMode, reconcile_all};
    pub use crate::netfilter::{AttachmentId, PacketFilter, RuleBackend};

    pub mod filter {
        pub use crate::netfilter::filter::{FirewallPart, IngressPolicy, add_rules};
    }

    pub mod masquerade {
        pub use crate::netfilter::masquerade::{
            MasqueradeOptions, add_addresses, check_addresses, delete_addresses,
            remove_stale_addresses,
        };
    }

    pub mod spoof {
        pub use crate::netfilter::spoof::{SpoofPart, add_port};
    }
}

/// Entry points of the fuzz targets.
pub mod fuzz {
    pub use crate::leases::fuzz::parse_lease_files;
    pub use crate::netfilter::iptables::IptablesTable;
    pub use crate::netlink::fuzz::parse_replies;
    pub use cni::args::CniArgPairs;
    pub use cni::json::{Json, encode_compact, encode_pretty};
    pub use cni::{CniResult, NetworkConfig, SpecVersion};

    pub mod dhcp {
        pub use crate::dhcp::{machine, record, rpc, timing, v4, v6};
    }

    pub mod resolver {
        pub use crate::resolver::message;
    }
}
