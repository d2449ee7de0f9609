//! The executable: the applet of its own file name, or of its first argument.

use std::path::Path;
use std::process::ExitCode;

use cnibox::applets::{self, APPLETS, LOOKUP};
use cnibox::skel::run;
use cnibox::tool::multicall;

fn main() -> ExitCode {
    let mut args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    let program = args.next().unwrap_or_default();
    let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_default();
    if let Some(applet) = applets::find(&name) {
        return run::main(applet, args.collect(), LOOKUP);
    }
    let mut args: Vec<String> = args.collect();
    match args.first().and_then(|first| applets::find(first)) {
        Some(applet) if multicall::is_own_name(&name) => {
            args.remove(0);
            run::main(applet, args, LOOKUP)
        }
        _ => multicall::main(&name, &args, APPLETS),
    }
}
