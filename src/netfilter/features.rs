//! The list of the features of the packet filter. Each is registered here, and only here.

use super::backend::{FilterFeature, PacketFilter};
use super::filter::firewalld;
use super::{egress, filter, localhost, masquerade, ports, spoof};

const FEATURES: &[FilterFeature] = &[
    masquerade::FEATURE,
    spoof::FEATURE,
    egress::FEATURE,
    filter::FEATURE,
    ports::FEATURE,
    localhost::FEATURE,
    firewalld::FEATURE,
];

impl PacketFilter {
    /// The packet filter with all features. Opens nothing yet.
    pub fn new() -> PacketFilter {
        PacketFilter::with_features(FEATURES)
    }
}

impl Default for PacketFilter {
    fn default() -> PacketFilter {
        PacketFilter::new()
    }
}
