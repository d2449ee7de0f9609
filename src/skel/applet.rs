//! An applet: what the executable does under one name.

use std::fmt;
use std::process::ExitCode;

use super::call::{Call, Kind, Lookup, OwnPlugin, RepairFn, RunFn};
use super::dispatch::{dispatch, examine, repair};
use super::plugin::{Plugin, Remarks};
use crate::cni::SpecVersion;
use crate::cni::json::keys::Keys;
use crate::error::Result;

/// One line of the table of applets.
pub struct Applet {
    /// The file name of the applet.
    pub name: &'static str,
    /// The kind of program.
    pub kind: Kind,
    /// One line of description.
    pub about: &'static str,
    pub main: Main,
}

/// A service of a plugin, started as the plugin with an argument: `dhcp daemon`.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    pub name: &'static str,
    /// The main function; its arguments are those after the name of the service.
    pub main: fn(Vec<String>) -> ExitCode,
}

/// How an applet is run.
#[derive(Clone, Copy, Debug)]
pub enum Main {
    /// A CNI plugin: environment and standard input in, JSON out.
    Plugin {
        /// The supported versions of the specification.
        versions: &'static [SpecVersion],
        /// The plugin as a function.
        run: RunFn,
        /// Restores an attachment.
        repair: RepairFn,
        /// The service, by its first argument.
        service: Option<Service>,
        /// Examines a configuration.
        lint: Lint,
    },
    /// A program with arguments (without the program's name).
    Tool(ToolFn),
}

/// The main function of a program for people.
pub type ToolFn = fn(Vec<String>, Table) -> ExitCode;

/// Examines a configuration for a plugin, without a container.
#[derive(Clone, Copy, Debug)]
pub struct Lint {
    /// The keys that the plugin reads.
    pub keys: fn() -> Keys,
    /// [`Plugin::examine`]; the verb of the call is ignored.
    pub examine: fn(&Call<'_>, &mut Remarks) -> Result<()>,
}

/// All applets of this executable.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    pub applets: &'static [Applet],
    /// Finds a plugin by its name.
    pub lookup: Lookup,
}

impl Table {
    /// The applet of exactly this name.
    pub fn find(&self, name: &str) -> Option<&'static Applet> {
        self.applets.iter().find(|applet| applet.name == name)
    }

    /// The names of the plugins.
    pub fn plugins(&self) -> impl Iterator<Item = &'static str> {
        self.applets.iter().filter(|applet| applet.kind != Kind::Tool).map(|applet| applet.name)
    }
}

impl Applet {
    /// The applet of a plugin.
    pub const fn plugin<P: Plugin>(kind: Kind) -> Applet {
        Applet::with_service::<P>(kind, None)
    }

    /// The applet of a plugin that has a service.
    pub const fn serviced<P: Plugin>(kind: Kind, service: Service) -> Applet {
        Applet::with_service::<P>(kind, Some(service))
    }

    const fn with_service<P: Plugin>(kind: Kind, service: Option<Service>) -> Applet {
        let lint = Lint { keys: P::keys, examine: examine::<P> };
        let main = Main::Plugin {
            versions: P::VERSIONS,
            run: dispatch::<P>,
            repair: repair::<P>,
            service,
            lint,
        };
        Applet { name: P::NAME, kind, about: P::ABOUT, main }
    }

    /// The applet of a program for people.
    pub const fn tool(name: &'static str, about: &'static str, main: ToolFn) -> Applet {
        Applet { name, kind: Kind::Tool, about, main: Main::Tool(main) }
    }

    /// The plugin, if this is one.
    pub fn as_plugin(&self) -> Option<OwnPlugin> {
        match self.main {
            Main::Plugin { run, repair, .. } => Some(OwnPlugin { kind: self.kind, run, repair }),
            Main::Tool(_) => None,
        }
    }
}

impl fmt::Debug for Applet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Applet({}, {:?})", self.name, self.kind)
    }
}
