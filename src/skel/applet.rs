//! An applet: what the executable does under one name.

use std::fmt;
use std::process::ExitCode;

use super::call::RunFn;
use super::dispatch::dispatch;
use super::plugin::Plugin;
use crate::cni::SpecVersion;

/// One line of the table of applets.
pub struct Applet {
    /// The file name it answers to.
    pub name: &'static str,
    /// What sort of program it is.
    pub kind: Kind,
    /// One line for a person.
    pub about: &'static str,
    /// What it does.
    pub main: Main,
}

/// What sort of program an applet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A plugin that makes an interface.
    Interface,
    /// A plugin that manages addresses, called by others.
    Ipam,
    /// A plugin that works on what those before it in a list made.
    Chained,
    /// A program for people.
    Tool,
}

/// A program that runs beside a plugin and under its name.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// The first argument.
    pub name: &'static str,
    /// What it does with the arguments behind that one.
    pub main: fn(Vec<String>) -> ExitCode,
}

/// How an applet is run.
#[derive(Clone, Copy, Debug)]
pub enum Main {
    /// A CNI plugin: environment and standard input in, JSON out.
    Plugin {
        /// The versions of the specification it speaks.
        versions: &'static [SpecVersion],
        /// The plugin as a function.
        run: RunFn,
        /// What else it does, by its first argument.
        service: Option<Service>,
    },
    /// A program with arguments (without the program's name).
    Tool(fn(Vec<String>) -> ExitCode),
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
        let main = Main::Plugin { versions: P::VERSIONS, run: dispatch::<P>, service };
        Applet { name: P::NAME, kind, about: P::ABOUT, main }
    }

    /// The applet of a program for people.
    pub const fn tool(
        name: &'static str,
        about: &'static str,
        main: fn(Vec<String>) -> ExitCode,
    ) -> Applet {
        Applet { name, kind: Kind::Tool, about, main: Main::Tool(main) }
    }

    /// The plugin as a function, if this is one.
    pub fn run_fn(&self) -> Option<RunFn> {
        match self.main {
            Main::Plugin { run, .. } => Some(run),
            Main::Tool(_) => None,
        }
    }
}

impl fmt::Debug for Applet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Applet({}, {:?})", self.name, self.kind)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Interface => "interface",
            Kind::Ipam => "ipam",
            Kind::Chained => "chained",
            Kind::Tool => "tool",
        })
    }
}
