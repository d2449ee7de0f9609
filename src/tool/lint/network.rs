//! The checks of one file: its form, its keys, its plugins and their order.

use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::keys::mistake;
use super::{Finding, Severity, Subject, keys, routes, together};
use crate::cni::json::Json;
use crate::cni::json::keys::Keys;
use crate::cni::json::place::{Place, Position, Step};
use crate::cni::{NetworkName, SpecVersion, version};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::options::nearest;
use crate::runtime::list::is_list;
use crate::runtime::{MAX_CONF_BYTES, NetworkList, PluginConf};
use crate::skel::call::{Call, Caller, Env, RunFn};
use crate::skel::{Kind, OwnPlugin, Remarks, Table, Verb};

/// The keys of a list (CNI specification, section 1). Runtimes match them exactly, including upper and lower case.
const LIST_KEYS: [&str; 7] = [
    "cniVersion",
    "cniVersions",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
    "name",
    "plugins",
];

/// Members of a plugin's configuration that are open to any plugin, or come from the runtime: their content is not
/// checked.
const OPEN: [&str; 5] = ["args", "capabilities", "ipam", "prevResult", "runtimeConfig"];

/// The configuration of a network, with its findings.
pub(super) struct Network<'a> {
    pub(super) file: PathBuf,
    text: String,
    table: Table,
    /// The `CNI_PATH` of checks on this node; absent if only the file is checked.
    cni_path: Option<&'a str>,
    /// Empty if it could not be read.
    pub(super) name: String,
    /// The position of the name.
    position: Option<Position>,
    /// The subnets of its IPAM configuration.
    pub(super) subnets: Vec<IpNet>,
    pub(super) findings: Vec<Finding>,
}

/// A plugin's configuration as a runtime passes it on.
struct Part<'a> {
    list: &'a NetworkList,
    conf: &'a PluginConf,
    /// The place in the file; absent if the plugin comes from a file in the directory beside it.
    place: Option<Place>,
    /// The plugin's name in messages.
    title: String,
}

impl Network<'_> {
    /// Reads and examines one file.
    pub(super) fn lint<'a>(file: &Path, table: Table, cni_path: Option<&'a str>) -> Network<'a> {
        let (file, text, name) = (file.to_owned(), String::new(), String::new());
        let (subnets, findings) = (Vec::new(), Vec::new());
        let mut network =
            Network { file, text, table, cni_path, name, position: None, subnets, findings };
        if let Err(error) = network.document() {
            let named = || network.position(&named_place(&error)?);
            let position = parser_position(error.msg()).or_else(named);
            network.findings.push(network.finding(Severity::Error, position, error));
        }
        network
    }

    fn document(&mut self) -> Result<()> {
        let bytes = files::read(&self.file, MAX_CONF_BYTES);
        let bytes = bytes.map_err(|e| Error::io("read the file", &e))?;
        self.text = String::from_utf8_lossy(&bytes).into_owned();
        let Ok(json) = Json::parse(&bytes) else {
            return NetworkList::from_any_file(&self.file).map(drop);
        };
        let is_list = is_list(&self.file);
        let has = |key| json.get_present(key).is_some();
        match (is_list, has("plugins"), has("type")) {
            (true, false, true) => {
                let msg = "this is the configuration of one plugin, not a list";
                let remedy = "write \"plugins\": [ ... ] around it, or name the file .conf";
                return Err(mistake(msg, remedy));
            }
            (false, true, false) => {
                let remedy = "name the file .conflist: others hold one plugin";
                return Err(mistake("this is a list of plugins", remedy));
            }
            _ => {}
        }
        let name = json.get_present("name").and_then(Json::as_str).unwrap_or_default();
        name.clone_into(&mut self.name);
        if let (true, Json::Object(members)) = (is_list, &json) {
            let names = members.iter().map(|(name, _)| name.as_str());
            for name in names.filter(|name| !LIST_KEYS.contains(name)) {
                self.list_key(name, &json);
            }
        }
        let list = NetworkList::from_any_file(&self.file)?;
        self.position = self.position(&Place::key("name"));
        if let Err(error) = NetworkName::parse(&list.name) {
            self.findings.push(self.finding(Severity::Error, self.position, error));
        }
        self.version(&list);
        let plugins = json.get_present("plugins").filter(|_| is_list);
        for (i, conf) in list.plugins.iter().enumerate() {
            let place = match plugins {
                None => Some(Place::default()),
                Some(Json::Array(items)) if i < items.len() => {
                    Some(Place::key("plugins").join(Step::Index(i)))
                }
                Some(_) => None,
            };
            let title = format!("plugin {i} \"{}\"", conf.plugin_type);
            self.plugin(&Part { list: &list, conf, place, title }, &list.plugins[..i]);
        }
        Ok(())
    }

    /// A key of the list that no runtime reads is a mistake only if it is a misspelling, or a key that a plugin of the list reads.
    fn list_key(&mut self, name: &str, list: &Json) {
        let types = match list.get_present("plugins") {
            Some(Json::Array(items)) => items.iter().filter_map(|item| item.get_present("type")),
            _ => return,
        };
        let plugins = types.filter_map(|name| self.table.plugin(name.as_str()?));
        let is_read = |plugin: OwnPlugin| (plugin.keys)().get(name).is_some();
        let place = Place::key(name);
        if plugins.clone().any(is_read) || OPEN.contains(&name) {
            let problem = format!("list: \"{name}\" beside \"plugins\" is not read");
            let error =
                mistake(problem, "move it into the object of the plugin that it is meant for");
            self.findings.push(self.finding(Severity::Warning, self.position(&place), error));
        } else if nearest(name, LIST_KEYS.iter().copied()).is_some() {
            self.unknown("list", &place, &LIST_KEYS);
        }
    }

    fn version(&mut self, list: &NetworkList) {
        if list.cni_version.is_empty() {
            let msg = "\"cniVersion\" is missing, which means 0.1.0";
            let remedy = "add the intended version, such as \"1.0.0\"";
            self.findings.push(self.warning(mistake(msg, remedy)));
        } else if SpecVersion::exact(&list.cni_version).is_none() {
            let msg = format!("unknown CNI version \"{}\"", list.cni_version);
            let known = SpecVersion::ALL.map(SpecVersion::as_str).join(", ");
            let near = version::nearest(&list.cni_version, &SpecVersion::ALL);
            let near = near.unwrap_or(SpecVersion::NEWEST);
            let error = mistake(msg, format!("write \"{near}\"; there are {known}"));
            let position = self.position(&Place::key("cniVersion"));
            self.findings.push(self.finding(Severity::Error, position, error));
        }
    }

    /// Examines a plugin that follows the plugins `before`.
    fn plugin(&mut self, part: &Part<'_>, before: &[PluginConf]) {
        let name = &part.conf.plugin_type;
        let Some(applet) = self.table.find(name) else {
            if let Some(near) = nearest(name, self.table.plugins()) {
                let remedy = format!("did you mean \"{near}\"?");
                self.report(Severity::Warning, part, "type", mistake("unknown plugin", remedy));
            }
            return;
        };
        let Some(plugin) = applet.as_plugin() else { return };
        self.order(part, applet.kind, before);
        if applet.kind == Kind::Ipam {
            return;
        }
        let ipam = self.ipam(part);
        let mut keys =
            OPEN.iter().fold(PluginConf::keys(), |keys, name| keys.with(name, Keys::Any));
        keys = keys.and((plugin.keys)());
        if let Some(ipam) = ipam {
            keys = keys.and((ipam.keys)());
        }
        self.unread_keys(part, &keys, ipam.is_some());
        let is_sound = self.values(part, plugin, ipam);
        for (key, error) in together::examine(part.conf, before, &self.subnets) {
            self.report(Severity::Warning, part, key, error);
        }
        if self.cni_path.is_some() {
            for error in routes::elsewhere(part.conf, &self.subnets) {
                self.report(Severity::Warning, part, "ipam", error);
            }
            if let Some(error) = together::own_ports(part.conf, before) {
                self.report(Severity::Note, part, "type", error);
            }
        }
        if is_sound && self.cni_path.is_some() {
            self.status(part, plugin.run);
        }
    }

    /// A chained plugin needs an interface, and only one plugin of a list creates an interface.
    fn order(&mut self, part: &Part<'_>, kind: Kind, before: &[PluginConf]) {
        // A plugin of another executable may create any interface.
        let kind_of = |name: &str| self.table.find(name).map_or(Kind::Interface, |a| a.kind);
        let names = before.iter().map(|conf| conf.plugin_type.as_str());
        let mut creators = names.filter(|name| kind_of(name) == Kind::Interface);
        let is_ours = |name: &str| self.table.find(name).is_some() && name != "loopback";
        let may_follow = ["ipvlan", "loopback"].contains(&part.conf.plugin_type.as_str());
        let (severity, problem, remedy) = match kind {
            Kind::Ipam => (
                Severity::Error,
                "it allocates addresses for other plugins, and creates no interface",
                "set it as \"type\" in the \"ipam\" of another plugin",
            ),
            Kind::Chained if creators.next().is_none() => (
                Severity::Error,
                "it needs a plugin before it that creates an interface",
                "move it behind that plugin",
            ),
            Kind::Interface if !may_follow && creators.any(is_ours) => (
                Severity::Warning,
                "a plugin before it creates the interface",
                "move it to a network of its own",
            ),
            _ => return,
        };
        self.report(severity, part, "type", mistake(problem, remedy));
    }

    /// The IPAM plugin, if it is part of this executable.
    fn ipam(&mut self, part: &Part<'_>) -> Option<OwnPlugin> {
        let name = &part.conf.ipam_type;
        let ipam = part.conf.json().get_present("ipam")?;
        match self.table.find(name) {
            Some(applet) if applet.kind == Kind::Ipam => return applet.as_plugin(),
            Some(_) => {
                let problem = format!("\"{name}\" is not an IPAM plugin");
                let remedy = "choose host-local, static or dhcp";
                self.report(Severity::Error, part, "ipam.type", mistake(problem, remedy));
            }
            None if name.is_empty() => {
                if matches!(ipam, Json::Object(members) if !members.is_empty()) {
                    let problem = "no address is allocated: \"ipam\" has no \"type\"";
                    let remedy = "add a type, such as \"host-local\"";
                    self.report(Severity::Warning, part, "ipam", mistake(problem, remedy));
                }
            }
            None => {
                let plugins = self.table.applets.iter().filter(|applet| applet.kind == Kind::Ipam);
                if let Some(near) = nearest(name, plugins.map(|applet| applet.name)) {
                    let problem = format!("unknown IPAM plugin \"{name}\"");
                    let remedy = format!("did you mean \"{near}\"?");
                    self.report(Severity::Warning, part, "ipam.type", mistake(problem, remedy));
                }
            }
        }
        None
    }

    /// Reports keys and capabilities that neither the plugin nor its IPAM plugin reads.
    fn unread_keys(&mut self, part: &Part<'_>, known: &Keys, own_ipam: bool) {
        for (below, names) in known.unknown_in(part.conf.json()) {
            let is_open = below.first_key().is_some_and(|first| OPEN.contains(&first));
            if (!is_open || (own_ipam && below.first_key() == Some("ipam")))
                && let Some(place) = &part.place
            {
                self.unknown(&part.title, &place.concat(&below), &names);
            }
        }
        for name in keys::above_cni(part.conf.json()) {
            let problem = format!("\"{name}\" of \"args\" is not read");
            let remedy = format!("write \"args\": {{\"cni\": {{\"{name}\": ...}}}}");
            self.report(Severity::Warning, part, &format!("args.{name}"), mistake(problem, remedy));
        }
        let runtime: Vec<_> =
            known.get("runtimeConfig").into_iter().flat_map(Keys::names).collect();
        for (capability, _) in part.conf.capabilities.iter().filter(|(_, wanted)| **wanted) {
            if !runtime.contains(&capability.as_str()) {
                let problem = format!("unused capability \"{capability}\"");
                let own: Vec<_> = known.names().filter(|key| !OPEN.contains(key)).collect();
                let error = mistake(problem, keys::capability_remedy(capability, &runtime, &own));
                self.report(Severity::Warning, part, "capabilities", error);
            }
        }
    }

    /// Reports an unknown key.
    fn unknown(&mut self, owner: &str, place: &Place, names: &[&str]) {
        let key = place.last_key().unwrap_or_default();
        if keys::is_comment(key) {
            return;
        }
        let problem = format!("{owner}: unknown key \"{key}\"");
        let error = mistake(problem, keys::remedy(key, names));
        self.findings.push(self.finding(Severity::Warning, self.position(place), error));
    }

    /// Lets the plugin and its IPAM plugin examine their values. Returns whether ADD could succeed.
    fn values(&mut self, part: &Part<'_>, plugin: OwnPlugin, ipam: Option<OwnPlugin>) -> bool {
        let request = part.request(&part.list.cni_version);
        let mut is_sound = true;
        for lint in [Some(plugin), ipam].into_iter().flatten() {
            let mut remarks = Remarks::default();
            let stdin = request.as_ref().map_err(Clone::clone);
            let examined =
                stdin.and_then(|stdin| (lint.examine)(&self.call(stdin, Verb::Add), &mut remarks));
            for warning in remarks.warnings {
                self.report_part(Severity::Warning, part, warning);
            }
            self.subnets.extend(remarks.subnets);
            if let Err(error) = examined {
                self.report_part(Severity::Error, part, error);
                is_sound = false;
            }
        }
        is_sound
    }

    /// Runs the plugin's STATUS on this node.
    fn status(&mut self, part: &Part<'_>, run: RunFn) {
        let reply = part
            .request(SpecVersion::NEWEST.as_str())
            .and_then(|stdin| run(&self.call(&stdin, Verb::Status)).context(|| "on this node"));
        if let Err(error) = reply {
            self.report_part(Severity::Error, part, error);
        }
    }

    fn call<'c>(&self, stdin: &'c [u8], verb: Verb) -> Call<'c> {
        let path = self.cni_path.unwrap_or_default().to_owned();
        let env = Env { command: verb.as_str().to_owned(), path, ..Env::default() };
        Call { env, stdin, table: self.table, caller: Caller::Runtime }
    }

    /// Reports an error of a plugin at the place that the error names, else at the plugin's type.
    fn report_part(&mut self, severity: Severity, part: &Part<'_>, error: Error) {
        let named = named_place(&error);
        let in_ipam = named.as_ref().map(|named| Place::key("ipam").concat(named));
        let mut below = [named, in_ipam, Some(Place::key("type"))].into_iter().flatten();
        let find = |place: &Place| below.find_map(|below| self.position(&place.concat(&below)));
        let position = part.place.as_ref().and_then(find);
        let finding = self.finding(severity, position, error.context(&part.title));
        self.findings.push(finding);
    }

    /// Reports a mistake at a place in a plugin's configuration, such as `ipam.type`.
    fn report(&mut self, severity: Severity, part: &Part<'_>, below: &str, error: Error) {
        let place = part.place.as_ref().map(|place| place.concat(&Place::parse(below)));
        let position = place.and_then(|place| self.position(&place));
        self.findings.push(self.finding(severity, position, error.context(&part.title)));
    }

    /// A warning about the network as a whole.
    pub(super) fn warning(&self, error: Error) -> Finding {
        self.finding(Severity::Warning, self.position, error)
    }

    fn finding(&self, severity: Severity, position: Option<Position>, error: Error) -> Finding {
        let (path, network) = (self.file.clone(), self.name.clone());
        Finding { severity, subject: Subject::File { path, position, network }, error }
    }

    fn position(&self, place: &Place) -> Option<Position> {
        place.position_in(&self.text)
    }
}

impl Part<'_> {
    /// The configuration as a runtime sends it.
    fn request(&self, version: &str) -> Result<Vec<u8>> {
        let name = self.list.name.as_str();
        let mut members =
            vec![("name".to_owned(), name.into()), ("cniVersion".to_owned(), version.into())];
        members.retain(|(_, value)| *value != Json::from(""));
        Ok(self.conf.inject(&members)?.bytes().to_vec())
    }
}

/// The place in the details of an error of [`Json::decode`]: `in "a.b[0]"`.
fn named_place(error: &Error) -> Option<Place> {
    let (_, rest) = error.details().split_once("in \"")?;
    Some(Place::parse(rest.split_once('"')?.0))
}

/// The position in a message of the JSON parser: `... at line 3 column 7`.
fn parser_position(message: &str) -> Option<Position> {
    let (_, rest) = message.rsplit_once(" at line ")?;
    let (line, column) = rest.split_once(" column ")?;
    let column: usize = column.parse().ok()?;
    Some(Position { line: line.parse().ok()?, column: column.max(1) })
}
