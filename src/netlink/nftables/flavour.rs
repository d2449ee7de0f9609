//! The flavours of sets: intervals, elements with times or counters, and elements that packets add;
//! with the netlink attributes that create such sets.

use super::super::attribute::AttributeBuilder;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::{ValueType, length_of_types};

/// `NFT_SET_CONCAT`: the parts of the key are compared one by one.
const NFT_SET_CONCAT: c_int = 0x80;

/// What makes the elements of a set differ from plain keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum SetFlavour {
    #[default]
    Plain,
    /// Keys are intervals.
    Intervals,
    /// Each element has a time after which it vanishes.
    Timeouts,
    /// Each element counts the packets that match it (Linux 5.7).
    Counters,
    /// Packets add elements, up to `size` of them, which vanish after `timeout` seconds; 0: with
    /// the next reboot.
    FilledByPackets { size: u32, timeout: u32 },
}

impl SetFlavour {
    pub(super) fn flags(self, key: &[ValueType]) -> c_int {
        match self {
            SetFlavour::Plain | SetFlavour::Counters => 0,
            SetFlavour::Timeouts => NFT_SET_TIMEOUT,
            SetFlavour::Intervals if key.len() > 1 => NFT_SET_INTERVAL | NFT_SET_CONCAT,
            SetFlavour::Intervals => NFT_SET_INTERVAL,
            SetFlavour::FilledByPackets { timeout: 0, .. } => NFT_SET_EVAL,
            SetFlavour::FilledByPackets { .. } => NFT_SET_EVAL | NFT_SET_TIMEOUT,
        }
    }

    pub(super) fn write_settings(self, key: &[ValueType], settings: &mut AttributeBuilder) {
        match self {
            SetFlavour::Intervals if key.len() > 1 => {
                settings.put_nested(NFTA_SET_DESC, |desc| {
                    desc.put_nested(NFTA_SET_DESC_CONCAT, |fields| {
                        for part in key {
                            let length = length_of_types(std::slice::from_ref(part));
                            fields.put_nested(NFTA_LIST_ELEM, |field| {
                                field.put_u32_be(NFTA_SET_FIELD_LEN, length)
                            });
                        }
                        fields
                    })
                });
            }
            SetFlavour::Counters => {
                settings.put_nested(NFTA_SET_EXPR, |expr| {
                    expr.put_text(NFTA_EXPR_NAME, "counter").put_nested(NFTA_EXPR_DATA, |data| data)
                });
            }
            SetFlavour::FilledByPackets { size, .. } => {
                settings
                    .put_nested(NFTA_SET_DESC, |desc| desc.put_u32_be(NFTA_SET_DESC_SIZE, size));
            }
            SetFlavour::Plain | SetFlavour::Timeouts | SetFlavour::Intervals => {}
        }
    }
}
