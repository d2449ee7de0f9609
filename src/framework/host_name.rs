//! The name of the host's end of a container's pair, by the key `hostInterfaceName`.

use super::context::CallContext;
use crate::attachment::{AttachmentId, sha512_hex};
use cni::InterfaceName;
use cni::error::{Error, ErrorContext, Result};

/// The digits of the hash at the end of a name that was cut.
const DIGITS: usize = 6;

impl CallContext<'_> {
    /// An attachment to the network, by which a configuration is examined.
    pub fn example_attachment(&self) -> AttachmentId<'_> {
        AttachmentId { network: self.net.name.as_str(), ifname: "eth0", id: "container" }
    }

    /// The name by the template `hostInterfaceName`, such as `v-{{pod}}`; `None` if that is empty.
    /// A name that is too long for the kernel is cut, and ends in a hash of the whole name.
    pub fn host_interface_name(
        &self,
        template: &str,
        owner: AttachmentId<'_>,
    ) -> Result<Option<InterfaceName>> {
        if template.is_empty() {
            return Ok(None);
        }
        // As Kubernetes runtimes write them.
        let argument = |key: &str| {
            let mut pairs = self.raw_args().split(';').filter_map(|pair| pair.split_once('='));
            pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
        };
        let values = [
            ("{{container}}", owner.id),
            ("{{ifname}}", owner.ifname),
            ("{{namespace}}", argument("K8S_POD_NAMESPACE").unwrap_or_default()),
            ("{{network}}", owner.network),
            ("{{pod}}", argument("K8S_POD_NAME").unwrap_or(owner.id)),
        ];
        let mut name = template.to_owned();
        for (variable, value) in values {
            name = name.replace(variable, value);
        }
        if name.contains("{{") {
            let msg = format!("hostInterfaceName \"{template}\" has an unknown variable");
            let known = values.map(|(variable, _)| variable).join(", ");
            return Err(Error::config(msg).with_details(format!("known are {known}")));
        }
        if name.len() > InterfaceName::MAX_LENGTH {
            let hash = sha512_hex(&name, DIGITS);
            let kept = InterfaceName::MAX_LENGTH - DIGITS - 1;
            name = format!("{}-{hash}", name.get(..kept).unwrap_or_default());
        }
        InterfaceName::parse(&name)
            .map(Some)
            .context(|| format!("hostInterfaceName \"{template}\""))
    }
}
