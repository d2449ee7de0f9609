//! The checks of one file: its form, its keys, its plugins and their order.

use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::keys::mistake_error;
use super::{Finding, FindingSubject, Severity, keys, routes, together};
use crate::framework::call::{PluginCall, PluginCaller, PluginFunction};
use crate::framework::{AppletKind, AppletTable, BuiltinPlugin, ConfigRemarks};
use cni::error::{Error, ErrorContext, Result};
use cni::exec::{find_plugin, split_path};
use cni::files;
use cni::json::keys::{DecodedKeys, is_comment};
use cni::json::place::{JsonPathStep, JsonValuePath, TextPosition};
use cni::json::{Json, encode_compact};
use cni::names::nearest_word;
use cni::plugin::CallEnvironment;
use cni::plugin::CniVerb;
use cni::runtime::is_list_file;
use cni::runtime::{MAX_CONF_BYTES, NetworkList, PluginConfig};
use cni::{NetworkName, SpecVersion, version};

/// The configuration of a network, with its findings.
pub(super) struct LintedNetwork<'a> {
    pub(super) file: PathBuf,
    text: String,
    table: AppletTable,
    /// The `CNI_PATH` of checks on this node; absent if only the file is checked.
    cni_path: Option<&'a str>,
    /// The name of the network; empty if it could not be read.
    pub(super) name: String,
    /// The position of the name.
    position: Option<TextPosition>,
    /// The subnets of its IPAM configuration.
    pub(super) subnets: Vec<IpNet>,
    pub(super) findings: Vec<Finding>,
}

/// A plugin's configuration as a runtime passes it on.
struct LintedPlugin<'a> {
    list: &'a NetworkList,
    conf: &'a PluginConfig,
    /// The configuration as it is written, with repeated keys.
    written: &'a Json,
    /// The place in the file; absent if the plugin comes from a file in the directory beside it.
    place: Option<JsonValuePath>,
    /// The plugin's name in messages.
    title: String,
}

impl LintedNetwork<'_> {
    /// Reads and examines one file.
    pub(super) fn lint_file<'a>(
        file: &Path,
        table: AppletTable,
        cni_path: Option<&'a str>,
    ) -> LintedNetwork<'a> {
        let mut network = LintedNetwork {
            file: file.to_owned(),
            text: String::new(),
            table,
            cni_path,
            name: String::new(),
            position: None,
            subnets: Vec::new(),
            findings: Vec::new(),
        };
        if let Err(error) = network.examine_document() {
            let position = parser_position(error.message())
                .or_else(|| network.find_position(&named_place(&error)?));
            network.findings.push(network.new_finding(Severity::Error, position, error));
        }
        network
    }

    fn examine_document(&mut self) -> Result<()> {
        let bytes = files::read_regular_file(&self.file, MAX_CONF_BYTES);
        let bytes = bytes.map_err(|e| Error::io("read the file", &e))?;
        self.text = String::from_utf8_lossy(&bytes).into_owned();
        let Ok(json) = Json::parse(&bytes) else {
            return NetworkList::from_any_file(&self.file).map(drop);
        };
        let is_list = is_list_file(&self.file);
        let has = |key| json.get_present_member(key).is_some();
        match (is_list, has("plugins"), has("type")) {
            (true, false, true) => {
                let msg = "this is the configuration of one plugin, not a list";
                let remedy = "write \"plugins\": [ ... ] around it, or name the file .conf";
                return Err(mistake_error(msg, remedy));
            }
            (false, true, false) => {
                let remedy = "name the file .conflist: others hold one plugin";
                return Err(mistake_error("this is a list of plugins", remedy));
            }
            _ => {}
        }
        let name = json.get_present_member("name").and_then(Json::as_str).unwrap_or_default();
        name.clone_into(&mut self.name);
        if let (true, Json::Object(members)) = (is_list, &json) {
            let names = members.iter().map(|(name, _)| name.as_str());
            for name in names.filter(|name| !NetworkList::KEYS.contains(name)) {
                self.examine_list_key(name, &json);
            }
        }
        let list = NetworkList::from_any_file(&self.file)?;
        self.position = self.find_position(&JsonValuePath::root_member("name"));
        if let Err(error) = NetworkName::parse(&list.name) {
            self.findings.push(self.new_finding(Severity::Error, self.position, error));
        }
        self.examine_version(&list);
        let plugins = json.get_present_member("plugins").filter(|_| is_list);
        for (i, conf) in list.plugins.iter().enumerate() {
            let (place, written) = match plugins {
                None => (Some(JsonValuePath::default()), conf.json()),
                Some(Json::Array(items)) if i < items.len() => {
                    let place = JsonValuePath::root_member("plugins");
                    (Some(place.join_step(JsonPathStep::Index(i))), &items[i])
                }
                Some(_) => (None, conf.json()),
            };
            let title = format!("plugin {i} \"{}\"", conf.plugin_type);
            let part = LintedPlugin { list: &list, conf, written, place, title };
            self.examine_plugin(&part, &list.plugins[..i]);
        }
        Ok(())
    }

    /// A key of the list that no runtime reads is a mistake only if it is a misspelling, or a key
    /// that a plugin of the list reads.
    fn examine_list_key(&mut self, name: &str, list: &Json) {
        let types = match list.get_present_member("plugins") {
            Some(Json::Array(items)) => {
                items.iter().filter_map(|item| item.get_present_member("type"))
            }
            _ => return,
        };
        let plugins = types.filter_map(|name| self.table.find_plugin(name.as_str()?));
        let place = JsonValuePath::root_member(name);
        if plugins.clone().any(|plugin| (plugin.keys)().member_keys(name).is_some())
            || PluginConfig::OPEN_KEYS.contains(&name)
        {
            let problem = format!("list: \"{name}\" beside \"plugins\" is not read");
            let error = mistake_error(
                problem,
                "move it into the object of the plugin that it is meant for",
            );
            let position = self.find_position(&place);
            self.findings.push(self.new_finding(Severity::Warning, position, error));
        } else if nearest_word(name, NetworkList::KEYS.iter().copied()).is_some() {
            self.report_unknown_key("list", &place, &NetworkList::KEYS);
        }
    }

    fn examine_version(&mut self, list: &NetworkList) {
        if list.cni_version.is_empty() {
            let msg = "\"cniVersion\" is missing, which means 0.1.0";
            let remedy = "add the intended version, such as \"1.0.0\"";
            self.findings.push(self.network_warning(mistake_error(msg, remedy)));
        } else if SpecVersion::parse_exact(&list.cni_version).is_none() {
            let msg = format!("unknown CNI version \"{}\"", list.cni_version);
            let known = SpecVersion::ALL.map(SpecVersion::as_str).join(", ");
            let near = version::nearest_supported(&list.cni_version, &SpecVersion::ALL);
            let near = near.unwrap_or(SpecVersion::NEWEST);
            let error = mistake_error(msg, format!("write \"{near}\"; there are {known}"));
            let position = self.find_position(&JsonValuePath::root_member("cniVersion"));
            self.findings.push(self.new_finding(Severity::Error, position, error));
        }
    }

    /// Examines a plugin that follows the plugins `before`.
    fn examine_plugin(&mut self, part: &LintedPlugin<'_>, before: &[PluginConfig]) {
        let name = &part.conf.plugin_type;
        let is_missing = self.report_missing_plugins(part);
        let Some(applet) = self.table.find_applet(name) else {
            if !is_missing && let Some(near) = nearest_word(name, self.table.plugin_names()) {
                let remedy = format!("did you mean \"{near}\"?");
                let error = mistake_error("unknown plugin", remedy);
                self.report_mistake(Severity::Warning, part, "type", error);
            }
            return;
        };
        let Some(plugin) = applet.as_plugin() else { return };
        self.examine_order(part, applet.kind, before);
        if applet.kind == AppletKind::Ipam {
            return;
        }
        let ipam = self.examine_ipam_type(part);
        let mut keys = PluginConfig::common_keys().union_with((plugin.keys)());
        if let Some(ipam) = ipam {
            keys = keys.union_with((ipam.keys)());
        }
        self.report_unread_keys(part, &keys, ipam.is_some());
        let is_sound = self.examine_values(part, plugin, ipam);
        for (key, error) in together::find_conflicts(part.conf, before, &self.subnets) {
            self.report_mistake(Severity::Warning, part, key, error);
        }
        if self.cni_path.is_some() {
            for error in routes::subnets_routed_elsewhere(part.conf, &self.subnets) {
                self.report_mistake(Severity::Warning, part, "ipam", error);
            }
            if let Some(error) = together::unreachable_own_ports(part.conf, before) {
                self.report_mistake(Severity::Note, part, "type", error);
            }
        }
        if is_sound && self.cni_path.is_some() {
            self.run_status(part, plugin.run);
        }
    }

    /// Reports the plugins that this node lacks; whether there are any. Without a directory of
    /// plugins this is no node: files are also examined where they are written.
    fn report_missing_plugins(&mut self, part: &LintedPlugin<'_>) -> bool {
        let dirs = split_path(self.cni_path.unwrap_or_default());
        let mut is_missing = false;
        for (key, name) in [("type", &part.conf.plugin_type), ("ipam.type", &part.conf.ipam_type)] {
            if !name.is_empty()
                && dirs.iter().any(|dir| dir.is_dir())
                && let Err(error) = find_plugin(name, &dirs)
            {
                is_missing = true;
                self.report_mistake(Severity::Error, part, key, error);
            }
        }
        is_missing
    }

    /// A chained plugin needs an interface, and only one plugin of a list creates an interface.
    fn examine_order(
        &mut self,
        part: &LintedPlugin<'_>,
        kind: AppletKind,
        before: &[PluginConfig],
    ) {
        // A plugin of another executable may create any interface.
        let kind_of =
            |name: &str| self.table.find_applet(name).map_or(AppletKind::Interface, |a| a.kind);
        let names = before.iter().map(|conf| conf.plugin_type.as_str());
        let mut creators = names.filter(|name| kind_of(name) == AppletKind::Interface);
        let name = &part.conf.plugin_type;
        let may_follow = ["ipvlan", "loopback"].contains(&name.as_str());
        let (severity, problem, remedy) = match kind {
            AppletKind::Ipam => (
                Severity::Error,
                "it allocates addresses for other plugins, and creates no interface",
                "set it as \"type\" in the \"ipam\" of another plugin",
            ),
            AppletKind::Chained if creators.next().is_none() => (
                Severity::Error,
                "it needs a plugin before it that creates an interface",
                "move it behind that plugin",
            ),
            AppletKind::Chained
                if name == "egress" && before.iter().any(|conf| conf.plugin_type == *name) =>
            {
                (
                    Severity::Error,
                    "there is an \"egress\" before it, and ADD refuses a second policy",
                    "write one policy that allows what both allow",
                )
            }
            AppletKind::Interface
                if !may_follow
                    && creators.any(|name| {
                        self.table.find_applet(name).is_some() && name != "loopback"
                    }) =>
            {
                (
                    Severity::Warning,
                    "a plugin before it creates the interface",
                    "move it to a network of its own",
                )
            }
            _ => return,
        };
        self.report_mistake(severity, part, "type", mistake_error(problem, remedy));
    }

    /// The IPAM plugin, if it is part of this executable.
    fn examine_ipam_type(&mut self, part: &LintedPlugin<'_>) -> Option<BuiltinPlugin> {
        let name = &part.conf.ipam_type;
        let ipam = part.conf.json().get_present_member("ipam")?;
        match self.table.find_applet(name) {
            Some(applet) if applet.kind == AppletKind::Ipam => return applet.as_plugin(),
            Some(_) => {
                let msg = format!("\"{name}\" is not an IPAM plugin");
                let error = mistake_error(msg, "choose host-local, static or dhcp");
                self.report_mistake(Severity::Error, part, "ipam.type", error);
            }
            None if name.is_empty() => {
                if matches!(ipam, Json::Object(members) if !members.is_empty()) {
                    let msg = "no address is allocated: \"ipam\" has no \"type\"";
                    let error = mistake_error(msg, "add a type, such as \"host-local\"");
                    self.report_mistake(Severity::Warning, part, "ipam", error);
                }
            }
            None => {
                let plugins =
                    self.table.applets.iter().filter(|applet| applet.kind == AppletKind::Ipam);
                if let Some(near) = nearest_word(name, plugins.map(|applet| applet.name)) {
                    let msg = format!("unknown IPAM plugin \"{name}\"");
                    let error = mistake_error(msg, format!("did you mean \"{near}\"?"));
                    self.report_mistake(Severity::Warning, part, "ipam.type", error);
                }
            }
        }
        None
    }

    /// Reports keys and capabilities that neither the plugin nor its IPAM plugin reads.
    fn report_unread_keys(&mut self, part: &LintedPlugin<'_>, known: &DecodedKeys, own_ipam: bool) {
        for (below, names) in known.find_unknown_keys(part.conf.json()) {
            let is_open =
                below.first_key().is_some_and(|first| PluginConfig::OPEN_KEYS.contains(&first));
            if (!is_open || (own_ipam && below.first_key() == Some("ipam")))
                && let Some(place) = &part.place
            {
                self.report_unknown_key(&part.title, &place.join_path(&below), &names);
            }
        }
        for name in keys::keys_above_cni(part.conf.json()) {
            let problem = format!("\"{name}\" of \"args\" is not read");
            let remedy = format!("write \"args\": {{\"cni\": {{\"{name}\": ...}}}}");
            let error = mistake_error(problem, remedy);
            self.report_mistake(Severity::Warning, part, &format!("args.{name}"), error);
        }
        let runtime: Vec<_> = known
            .member_keys("runtimeConfig")
            .into_iter()
            .flat_map(DecodedKeys::field_names)
            .collect();
        for (capability, _) in part.conf.capabilities.iter().filter(|(_, wanted)| **wanted) {
            if !runtime.contains(&capability.as_str()) {
                let problem = format!("unused capability \"{capability}\"");
                let own: Vec<_> = known
                    .field_names()
                    .filter(|key| !PluginConfig::OPEN_KEYS.contains(key))
                    .collect();
                let error =
                    mistake_error(problem, keys::capability_remedy(capability, &runtime, &own));
                self.report_mistake(Severity::Warning, part, "capabilities", error);
            }
        }
    }

    fn report_unknown_key(&mut self, owner: &str, place: &JsonValuePath, names: &[&str]) {
        let key = place.last_key().unwrap_or_default();
        if is_comment(key) {
            return;
        }
        let problem = format!("{owner}: unknown key \"{key}\"");
        let error = mistake_error(problem, keys::unread_key_remedy(key, names));
        self.findings.push(self.new_finding(Severity::Warning, self.find_position(place), error));
    }

    /// Lets the plugin and its IPAM plugin examine their values. Returns whether ADD could succeed.
    fn examine_values(
        &mut self,
        part: &LintedPlugin<'_>,
        plugin: BuiltinPlugin,
        ipam: Option<BuiltinPlugin>,
    ) -> bool {
        let request = part.encode_request(&part.list.cni_version);
        let mut is_sound = true;
        for lint in [Some(plugin), ipam].into_iter().flatten() {
            let mut remarks = ConfigRemarks::default();
            let stdin = request.as_ref().map_err(Clone::clone);
            let examined = stdin.and_then(|stdin| {
                (lint.examine)(&self.build_call(stdin, CniVerb::Add), &mut remarks)
            });
            for warning in remarks.warnings {
                self.report_plugin_error(Severity::Warning, part, warning);
            }
            self.subnets.extend(remarks.subnets);
            if let Err(error) = examined {
                self.report_refusal(part, error);
                is_sound = false;
            }
        }
        is_sound
    }

    /// Reports an error that ADD will have, in place of the warning of an unread key if it is
    /// about that key.
    fn report_refusal(&mut self, part: &LintedPlugin<'_>, error: Error) {
        let refused = error.clone().context(&part.title);
        let warned = self.findings.iter_mut().find(|finding| {
            finding.severity == Severity::Warning
                && refused.message().starts_with(finding.error.message())
        });
        match warned {
            Some(finding) => {
                finding.severity = Severity::Error;
                finding.error = refused;
            }
            None => self.report_plugin_error(Severity::Error, part, error),
        }
    }

    fn run_status(&mut self, part: &LintedPlugin<'_>, run: PluginFunction) {
        let reply = part.encode_request(SpecVersion::NEWEST.as_str()).and_then(|stdin| {
            let call = PluginCall {
                caller: PluginCaller::Lint,
                ..self.build_call(&stdin, CniVerb::Status)
            };
            run(&call).context(|| "on this node")
        });
        if let Err(error) = reply {
            self.report_plugin_error(Severity::Error, part, error);
        }
    }

    fn build_call<'c>(&self, stdin: &'c [u8], verb: CniVerb) -> PluginCall<'c> {
        let path = self.cni_path.unwrap_or_default().to_owned();
        let env = CallEnvironment {
            command: verb.as_str().to_owned(),
            path,
            ..CallEnvironment::default()
        };
        PluginCall::new(env, stdin, self.table)
    }

    /// Reports an error of a plugin at the place that the error names, else at the plugin's type.
    fn report_plugin_error(&mut self, severity: Severity, part: &LintedPlugin<'_>, error: Error) {
        let named = named_place(&error);
        let in_ipam =
            named.as_ref().map(|named| JsonValuePath::root_member("ipam").join_path(named));
        let mut below =
            [named, in_ipam, Some(JsonValuePath::root_member("type"))].into_iter().flatten();
        let position = part
            .place
            .as_ref()
            .and_then(|place| below.find_map(|below| self.find_position(&place.join_path(&below))));
        let finding = self.new_finding(severity, position, error.context(&part.title));
        self.findings.push(finding);
    }

    /// Reports a mistake at a place in a plugin's configuration, such as `ipam.type`.
    fn report_mistake(
        &mut self,
        severity: Severity,
        part: &LintedPlugin<'_>,
        below: &str,
        error: Error,
    ) {
        let place = part.place.as_ref().map(|place| place.join_path(&JsonValuePath::parse(below)));
        let position = place.and_then(|place| self.find_position(&place));
        self.findings.push(self.new_finding(severity, position, error.context(&part.title)));
    }

    /// A warning about the network as a whole.
    pub(super) fn network_warning(&self, error: Error) -> Finding {
        self.new_finding(Severity::Warning, self.position, error)
    }

    fn new_finding(
        &self,
        severity: Severity,
        position: Option<TextPosition>,
        error: Error,
    ) -> Finding {
        let subject =
            FindingSubject::File { path: self.file.clone(), position, network: self.name.clone() };
        Finding { severity, subject, error }
    }

    fn find_position(&self, place: &JsonValuePath) -> Option<TextPosition> {
        place.position_in(&self.text)
    }
}

impl LintedPlugin<'_> {
    /// The configuration as a runtime sends it, but with repeated keys.
    fn encode_request(&self, version: &str) -> Result<Vec<u8>> {
        let mut request = self.written.clone().with_normalised_numbers();
        for (key, value) in [("name", self.list.name.as_str()), ("cniVersion", version)] {
            if !value.is_empty() {
                request.set_member(key, value.into());
            }
        }
        Ok(encode_compact(&request)?.into_bytes())
    }
}

/// The place in the details of an error of [`Json::decode`]: `in "a.b[0]"`.
fn named_place(error: &Error) -> Option<JsonValuePath> {
    let (_, rest) = error.details().split_once("in \"")?;
    Some(JsonValuePath::parse(rest.split_once('"')?.0))
}

/// The position in a message of the JSON parser: `... at line 3 column 7`.
fn parser_position(message: &str) -> Option<TextPosition> {
    let (_, rest) = message.rsplit_once(" at line ")?;
    let (line, column) = rest.split_once(" column ")?;
    let column: usize = column.parse().ok()?;
    Some(TextPosition { line: line.parse().ok()?, column: column.max(1) })
}
