//! The maintainer scripts of the debs: `tests/packages.sh` with stand-ins of the packages, in a
//! root of its own.

use std::process::Command;

use cnibox_tests::root;

/// The exit status of the script without dpkg and apt.
const MISSING: i32 = 77;

#[test]
fn no_call_fails_while_a_deb_replaces_the_reference() {
    let script = root().join("tests/packages.sh");
    let output = Command::new(script).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    print!("{}", String::from_utf8_lossy(&text));
    match output.status.code() {
        Some(MISSING) => println!("SKIP: no dpkg, no apt-get"),
        code => assert_eq!(code, Some(0)),
    }
}
