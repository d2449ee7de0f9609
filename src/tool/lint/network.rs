//! One file: its form, its keys, its plugins and their order.

use std::fs;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::{Finding, Scope, Severity};
use crate::cni::json::Json;
use crate::cni::json::keys::Keys;
use crate::cni::json::place::{Place, Position, Step};
use crate::cni::{NetworkName, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::options::nearest;
use crate::runtime::list::is_list;
use crate::runtime::{NetworkList, PluginConf};
use crate::skel::call::{Call, Caller, Env};
use crate::skel::{Applet, Kind, Main, OwnPlugin, Remarks, Table, Verb};

/// The keys of a list (spec, section 1); a runtime reads them in this case only.
const LIST_KEYS: [&str; 7] = [
    "cniVersion",
    "cniVersions",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
    "name",
    "plugins",
];

/// Members of a plugin's configuration that are for any plugin, or come from the runtime: what is in
/// them is not judged.
const OPEN: [&str; 5] = ["args", "capabilities", "ipam", "prevResult", "runtimeConfig"];

/// What other networks have to be compared with.
#[derive(Debug, Default)]
pub(super) struct Network {
    pub(super) file: PathBuf,
    pub(super) name: String,
    /// The subnets that its addresses are of.
    pub(super) subnets: Vec<IpNet>,
    /// Where its name is.
    position: Option<Position>,
}

impl Network {
    /// A warning about the network as a whole.
    pub(super) fn warning(&self, error: &Error) -> Finding {
        Finding::new(&self.file, &self.name, self.position, Severity::Warning, error)
    }
}

/// Looks at one file.
pub(super) fn lint(file: &Path, table: Table, scope: Scope<'_>) -> (Network, Vec<Finding>) {
    let mut linter = Linter {
        file,
        text: String::new(),
        table,
        scope,
        network: Network { file: file.to_owned(), ..Network::default() },
        findings: Vec::new(),
    };
    if let Err(error) = linter.document() {
        let position = parser_position(error.msg()).or_else(|| linter.named_position(&error));
        let name = &linter.network.name;
        let finding = Finding::new(file, name, position, Severity::Error, &error);
        linter.findings.push(finding);
    }
    (linter.network, linter.findings)
}

struct Linter<'a> {
    file: &'a Path,
    text: String,
    table: Table,
    scope: Scope<'a>,
    network: Network,
    findings: Vec<Finding>,
}

/// A plugin's configuration as a runtime passes it on.
struct Part<'a> {
    /// Where it is in the file; those of a folder beside the file have no place.
    place: Option<Place>,
    conf: &'a PluginConf,
    /// How it is named in messages.
    title: String,
}

impl Linter<'_> {
    fn document(&mut self) -> Result<()> {
        let bytes = fs::read(self.file).map_err(|e| Error::io("read the file", &e))?;
        self.text = String::from_utf8_lossy(&bytes).into_owned();
        let is_list = is_list(self.file);
        let what = if is_list { "configuration list" } else { "configuration" };
        let json = Json::parse(&bytes)
            .map_err(|why| Error::new(Code::DECODE, format!("error parsing {what}: {why}")))?;
        let has = |key| json.get_present(key).is_some();
        match (is_list, has("plugins"), has("type")) {
            (true, false, true) => {
                return Err(Error::config("this is the configuration of one plugin, not a list")
                    .with_details("write \"plugins\": [ ... ] around it, or name the file .conf"));
            }
            (false, true, false) => {
                return Err(Error::config("this is a list of plugins")
                    .with_details("name the file .conflist: others hold one plugin"));
            }
            _ => {}
        }
        let name = json.get_present("name").and_then(Json::as_str).unwrap_or_default();
        name.clone_into(&mut self.network.name);
        if is_list {
            self.list_keys(&json);
        }
        let list = NetworkList::from_any_file(self.file)?;
        self.network.position = self.position(&Place::key("name"));
        if let Err(error) = NetworkName::parse(&list.name) {
            self.report(Severity::Error, Some(&Place::key("name")), &error);
        }
        self.version(&list);
        let plugins = json.get_present("plugins").filter(|_| is_list);
        let mut before = Vec::new();
        for (i, conf) in list.plugins.iter().enumerate() {
            let place = match plugins {
                None => Some(Place::default()),
                Some(Json::Array(items)) if i < items.len() => {
                    Some(Place::key("plugins").join(Step::Index(i)))
                }
                Some(_) => None,
            };
            let title = format!("plugin {i} \"{}\"", conf.plugin_type);
            let kind = self.table.find(&conf.plugin_type).map(|applet| applet.kind);
            self.plugin(&Part { place, conf, title }, &before, &list);
            before.push(kind);
        }
        Ok(())
    }

    fn list_keys(&mut self, json: &Json) {
        let Json::Object(members) = json else { return };
        for (name, _) in members.iter().filter(|(name, _)| !LIST_KEYS.contains(&name.as_str())) {
            self.unknown("list", &Place::key(name), &LIST_KEYS);
        }
    }

    fn version(&mut self, list: &NetworkList) {
        let place = Place::key("cniVersion");
        if list.cni_version.is_empty() {
            let error = Error::config("\"cniVersion\" is missing, which means 0.1.0")
                .with_details("write the version that you mean, such as \"1.0.0\"");
            self.report(Severity::Warning, Some(&Place::key("name")), &error);
        } else if SpecVersion::exact(&list.cni_version).is_none() {
            let known = SpecVersion::ALL.map(SpecVersion::as_str).join(", ");
            let error =
                Error::config(format!("there is no version \"{}\" of CNI", list.cni_version))
                    .with_details(format!("choose one of {known}"));
            self.report(Severity::Error, Some(&place), &error);
        }
    }

    fn plugin(&mut self, part: &Part<'_>, before: &[Option<Kind>], list: &NetworkList) {
        let name = &part.conf.plugin_type;
        let Some(applet) = self.table.find(name) else {
            if let Some(near) = nearest(name, self.table.plugins()) {
                let error = Error::config(format!("{}: there may be no such plugin", part.title))
                    .with_details(format!("did you mean \"{near}\"?"));
                self.report(Severity::Warning, part.at("type").as_ref(), &error);
            }
            return;
        };
        let Main::Plugin(plugin) = applet.main else { return };
        self.order(part, applet.kind, before);
        if applet.kind == Kind::Ipam {
            return;
        }
        let ipam = self.ipam(part);
        let keys = common_keys().and((plugin.keys)());
        let keys = ipam.iter().fold(keys, |keys, (_, ipam)| keys.and((ipam.keys)()));
        self.keys(part, &keys, ipam.is_some());
        let sound = self.examine(part, plugin, ipam, list);
        if sound && self.scope != Scope::Files {
            self.status(part, applet, list);
        }
    }

    /// A chained plugin needs an interface, and a list makes one.
    fn order(&mut self, part: &Part<'_>, kind: Kind, before: &[Option<Kind>]) {
        let makes_one = |kind: &Option<Kind>| matches!(kind, None | Some(Kind::Interface));
        let (severity, why, remedy) = match kind {
            Kind::Ipam => (
                Severity::Error,
                "it gives addresses to other plugins, and makes no interface",
                "write it as \"type\" of the \"ipam\" of another plugin",
            ),
            Kind::Chained if !before.iter().any(makes_one) => (
                Severity::Error,
                "it needs a plugin before it that makes an interface",
                "put it behind that",
            ),
            Kind::Interface
                if before.contains(&Some(Kind::Interface))
                    && !["ipvlan", "loopback"].contains(&part.conf.plugin_type.as_str()) =>
            {
                (
                    Severity::Warning,
                    "a plugin before it has made the interface",
                    "give it a network of its own",
                )
            }
            _ => return,
        };
        let error = Error::config(format!("{}: {why}", part.title)).with_details(remedy);
        self.report(severity, part.at("type").as_ref(), &error);
    }

    /// The IPAM plugin, if it is one of ours.
    fn ipam(&mut self, part: &Part<'_>) -> Option<(&'static Applet, OwnPlugin)> {
        let ipam = part.conf.json().get_present("ipam")?;
        let name = &part.conf.ipam_type;
        if name.is_empty() {
            if matches!(ipam, Json::Object(members) if !members.is_empty()) {
                let error = Error::config(format!(
                    "{}: no address is given: \"ipam\" has no \"type\"",
                    part.title
                ))
                .with_details("add a type, such as \"host-local\"");
                self.report(Severity::Warning, part.at("ipam").as_ref(), &error);
            }
            return None;
        }
        let place = part.place.as_ref().map(|place| place.concat(&Place::parse("ipam.type")));
        let Some(applet) = self.table.find(name) else {
            let plugins = self.table.applets.iter().filter(|applet| applet.kind == Kind::Ipam);
            if let Some(near) = nearest(name, plugins.map(|applet| applet.name)) {
                let msg = format!("{}: there may be no IPAM plugin \"{name}\"", part.title);
                let error = Error::config(msg).with_details(format!("did you mean \"{near}\"?"));
                self.report(Severity::Warning, place.as_ref(), &error);
            }
            return None;
        };
        match applet.main {
            Main::Plugin(plugin) if plugin.kind == Kind::Ipam => Some((applet, plugin)),
            _ => {
                let msg = format!("{}: \"{name}\" is no plugin that gives addresses", part.title);
                let error =
                    Error::config(msg).with_details("those are host-local, static and dhcp");
                self.report(Severity::Error, place.as_ref(), &error);
                None
            }
        }
    }

    /// Keys and capabilities that neither the plugin nor its IPAM plugin reads.
    fn keys(&mut self, part: &Part<'_>, keys: &Keys, own_ipam: bool) {
        for (below, names) in keys.unknown_in(part.conf.json()) {
            let is_open = below.first_key().is_some_and(|first| OPEN.contains(&first));
            if (!is_open || (own_ipam && below.first_key() == Some("ipam")))
                && let Some(place) = &part.place
            {
                self.unknown(&part.title, &place.concat(&below), &names);
            }
        }
        let runtime: Vec<_> = keys.get("runtimeConfig").into_iter().flat_map(Keys::names).collect();
        for (capability, _) in part.conf.capabilities.iter().filter(|(_, wanted)| **wanted) {
            if !runtime.contains(&capability.as_str()) {
                let msg =
                    format!("{}: it does not use the capability \"{capability}\"", part.title);
                let error = Error::config(msg).with_details(suggestion(capability, &runtime));
                self.report(Severity::Warning, part.at("capabilities").as_ref(), &error);
            }
        }
    }

    fn unknown(&mut self, who: &str, place: &Place, names: &[&str]) {
        let key = place.last_key().unwrap_or_default();
        let error = Error::config(format!("{who}: unknown key \"{key}\""));
        self.report(Severity::Warning, Some(place), &error.with_details(suggestion(key, names)));
    }

    /// Asks the plugins themselves; whether they would work.
    fn examine(
        &mut self,
        part: &Part<'_>,
        plugin: OwnPlugin,
        ipam: Option<(&'static Applet, OwnPlugin)>,
        list: &NetworkList,
    ) -> bool {
        // The runtime may supply the addresses that the configuration lacks.
        let supplied = |name: &&str| part.conf.capabilities.get(*name) == Some(&true);
        let ipam = ipam.filter(|_| !["ips", "ipRanges"].iter().any(supplied));
        let plugins = [Some(plugin), ipam.map(|(_, plugin)| plugin)];
        let request = part.request(&list.name, &list.cni_version);
        let mut sound = true;
        for plugin in plugins.into_iter().flatten() {
            let mut remarks = Remarks::default();
            let examined = request
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|stdin| (plugin.examine)(&self.call(stdin, Verb::Add), &mut remarks));
            for warning in remarks.warnings {
                self.report_part(Severity::Warning, part, &warning);
            }
            self.network.subnets.extend(remarks.subnets);
            if let Err(error) = examined {
                self.report_part(Severity::Error, part, &error);
                sound = false;
            }
        }
        sound
    }

    /// Asks the plugin whether this node can serve its next ADD.
    fn status(&mut self, part: &Part<'_>, applet: &Applet, list: &NetworkList) {
        let Some(plugin) = applet.as_plugin() else { return };
        let newest = SpecVersion::NEWEST.as_str();
        let answer = part.request(&list.name, newest).and_then(|stdin| {
            (plugin.run)(&self.call(&stdin, Verb::Status)).context(|| "on this node")
        });
        if let Err(error) = answer {
            self.report_part(Severity::Error, part, &error);
        }
    }

    fn call<'c>(&self, stdin: &'c [u8], verb: Verb) -> Call<'c> {
        let path = match self.scope {
            Scope::Files => String::new(),
            Scope::Node { cni_path } => cni_path.to_owned(),
        };
        let env = Env { command: verb.as_str().to_owned(), path, ..Env::default() };
        Call { env, stdin, table: self.table, caller: Caller::Runtime }
    }

    /// Reports what a plugin says of its configuration, where that says which place it means.
    fn report_part(&mut self, severity: Severity, part: &Part<'_>, error: &Error) {
        let error = error.clone().context(&part.title);
        let below = named_place(&error);
        let candidates = below.iter().flat_map(|below| {
            let ipam = Place::key("ipam").concat(below);
            part.place.iter().flat_map(move |place| [place.concat(below), place.concat(&ipam)])
        });
        let candidates: Vec<Place> = candidates.chain(part.at("type")).collect();
        let place = candidates.iter().find(|place| self.position(place).is_some());
        self.report(severity, place, &error);
    }

    fn report(&mut self, severity: Severity, place: Option<&Place>, error: &Error) {
        let position = place.and_then(|place| self.position(place));
        let name = &self.network.name;
        self.findings.push(Finding::new(self.file, name, position, severity, error));
    }

    fn position(&self, place: &Place) -> Option<Position> {
        place.position_in(&self.text)
    }

    fn named_position(&self, error: &Error) -> Option<Position> {
        named_place(error).and_then(|place| self.position(&place))
    }
}

impl Part<'_> {
    /// The configuration as a runtime sends it.
    fn request(&self, name: &str, version: &str) -> Result<Vec<u8>> {
        let mut members =
            vec![("name".to_owned(), name.into()), ("cniVersion".to_owned(), version.into())];
        members.retain(|(_, value)| *value != Json::from(""));
        Ok(self.conf.inject(&members)?.bytes().to_vec())
    }

    fn at(&self, key: &str) -> Option<Place> {
        self.place.as_ref().map(|place| place.join(Step::Key(key.to_owned())))
    }
}

/// The keys that the specification gives every plugin.
fn common_keys() -> Keys {
    OPEN.iter().fold(PluginConf::keys(), |keys, name| keys.with(name, Keys::Any))
}

fn suggestion(word: &str, known: &[&str]) -> String {
    match nearest(word, known.iter().copied()) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => "remove it".to_owned(),
    }
}

/// The place that the details of an error of [`Json::decode`] name: `in "a.b[0]"`.
fn named_place(error: &Error) -> Option<Place> {
    let (_, rest) = error.details().split_once("in \"")?;
    Some(Place::parse(rest.split_once('"')?.0))
}

/// The position in a message of the parser: `... at line 3 column 7`.
fn parser_position(message: &str) -> Option<Position> {
    let (_, rest) = message.rsplit_once(" at line ")?;
    let (line, column) = rest.split_once(" column ")?;
    let column: usize = column.parse().ok()?;
    Some(Position { line: line.parse().ok()?, column: column.max(1) })
}
