//! From one version to another: upwards nothing is lost, downwards what the older one lacks.

use std::net::IpAddr;

use super::{CniResult, IpConfig, Route};
use crate::cni::version::{Generation, SpecVersion};
use crate::error::{Error, Result};
use crate::sort::sort_by_key;

impl CniResult {
    /// The same result within the limits of `to`.
    ///
    /// Fails if `to` is 0.1.0 or 0.2.0 and there is no address: those layouts are nothing but
    /// addresses. A result that came in such a version passes unchanged.
    pub fn convert(mut self, to: SpecVersion) -> Result<CniResult> {
        let from = self.version.generation();
        self.version = to;
        if to.generation() >= from {
            return Ok(self);
        }
        if from == Generation::Current {
            for interface in &mut self.interfaces {
                interface.mtu = 0;
                interface.socket_path.clear();
                interface.pci_id.clear();
            }
        }
        if to.generation() == Generation::Ip4Ip6 { self.keep_one_per_family() } else { Ok(self) }
    }

    fn keep_one_per_family(mut self) -> Result<CniResult> {
        let first = |wanted: fn(&IpAddr) -> bool| {
            self.ips.iter().find(|ip| wanted(&ip.address.addr())).cloned()
        };
        let (v4, v6) = (first(IpAddr::is_ipv4), first(IpAddr::is_ipv6));
        if v4.is_none() && v6.is_none() {
            return Err(Error::internal("cannot convert: no valid IP addresses"));
        }
        let kept = |route: &Route| if route.dst.addr().is_ipv4() { &v4 } else { &v6 }.is_some();
        let mut routes: Vec<Route> = self.routes.iter().filter(|r| kept(r)).map(bare).collect();
        sort_by_key(&mut routes, |route| route.dst.addr().is_ipv6());
        self.routes = routes;
        self.ips = v4.into_iter().chain(v6).map(|ip| IpConfig { interface: None, ..ip }).collect();
        self.interfaces.clear();
        Ok(self)
    }
}

fn bare(route: &Route) -> Route {
    Route { gw: route.gw, ..Route::to(route.dst) }
}
