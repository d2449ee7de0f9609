//! Devices of the host that containers have: moved there by the plugins host-device and bond, and
//! given back.
//!
//! | step | module |
//! | --- | --- |
//! | the state of the device on the host | [`origin`] |
//! | what distinguishes it from all other links | [`identity`] |
//! | the record of the attachment, before the device is moved | [`record`] |
//! | the move, and the way back | [`transfer`] |
//! | DEL, GC and a failed ADD find the device | [`location`] |
//! | what an attachment that has ended left to do | [`lost`] |

pub mod identity;
pub mod location;
pub mod lost;
pub mod origin;
pub mod record;
pub mod transfer;
