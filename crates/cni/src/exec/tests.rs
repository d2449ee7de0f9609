//! Plugins as processes: small shell scripts.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use tempfile::TempDir;

use super::process::execute_with_stderr;
use super::*;

fn script(dir: &Path, name: &str, body: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn call<'a>(path: &'a Path, stdin: &'a [u8]) -> PluginCommand<'a> {
    PluginCommand { path, env: vec![], stdin, deadline: Some(Duration::from_secs(20)) }
}

fn run(body: &str, stdin: &[u8]) -> Result<Vec<u8>> {
    let dir = dir();
    execute_with_stderr(&call(&script(dir.path(), "p", body), stdin), &mut io::sink())
}

fn failure(body: &str) -> String {
    run(body, b"{}").unwrap_err().to_string()
}

/// A writer that records when each part arrived.
#[derive(Default)]
struct Arrivals(Vec<(Instant, Vec<u8>)>);

impl Write for Arrivals {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push((Instant::now(), bytes.to_vec()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn errors_of_the_plugin_search_equal_the_references() {
    let (a, b) = (dir(), dir());
    let dirs = [a.path().to_owned(), b.path().to_owned()];
    let msg =
        |name: &str, dirs: &[PathBuf]| find_plugin(name, dirs).unwrap_err().message().to_owned();
    assert_eq!(msg("", &dirs), "no plugin name provided");
    assert_eq!(msg("../x", &dirs), "invalid plugin name: ../x");
    assert_eq!(msg("x", &[]), "no paths provided");
    assert_eq!(msg("x", &[PathBuf::new()]), "no paths provided");
    let list = format!("[{} {}]", a.path().display(), b.path().display());
    assert_eq!(msg("x", &dirs), format!("failed to find plugin \"x\" in path {list}"));
    fs::create_dir(b.path().join("x")).unwrap();
    assert!(msg("x", &dirs).starts_with("failed to find"), "a directory is no plugin");
}

#[test]
fn the_first_executable_is_found_before_any_plain_file() {
    let (a, b) = (dir(), dir());
    let dirs = [PathBuf::new(), a.path().to_owned(), b.path().to_owned()];
    fs::write(a.path().join("p"), "data").unwrap();
    assert_eq!(find_plugin("p", &dirs).unwrap(), a.path().join("p"));
    let error = execute_plugin(&call(&a.path().join("p"), b"")).unwrap_err();
    let path = a.path().join("p");
    assert_eq!(
        error.message(),
        format!(
            "netplugin failed with no error message: fork/exec {}: permission denied",
            path.display()
        )
    );
    symlink(script(b.path(), "real", "exit 0"), b.path().join("p")).unwrap();
    assert_eq!(find_plugin("p", &dirs).unwrap(), b.path().join("p"));
}

#[test]
fn a_path_is_split_at_its_colons() {
    assert_eq!(split_path(":/a::rel:"), [PathBuf::from("/a"), PathBuf::from("rel")]);
    assert!(split_path("").is_empty());
}

#[test]
fn environment_and_input_reach_the_plugin() {
    let dir = dir();
    let path = script(dir.path(), "p", r#"echo "$# $CNI_COMMAND $HOME $(cat)""#);
    let mut call = call(&path, b"{\"a\":1}");
    call.env = vec![("CNI_COMMAND", "ADD".to_owned())];
    let home = env::var("HOME").unwrap_or_default();
    let said = String::from_utf8(execute_plugin(&call).unwrap()).unwrap();
    assert_eq!(said, format!("0 ADD {home} {{\"a\":1}}\n"));
}

#[test]
fn failures_have_the_references_texts() {
    let nothing = "netplugin failed with no error message: ";
    assert_eq!(failure("exit 3"), format!("{nothing}exit status 3"));
    assert_eq!(failure("kill -9 $$"), format!("{nothing}signal: killed"));
    assert_eq!(failure("kill -TERM $$"), format!("{nothing}signal: terminated"));
    assert_eq!(failure("echo boo >&2; exit 1"), "netplugin failed: \"boo\\n\": exit status 1");
    let typed = run(r#"echo '{"code":50,"msg":"down","details":"why"}'; exit 1"#, b"").unwrap_err();
    assert_eq!(
        (typed.code(), typed.to_string()),
        (ErrorCode::NOT_AVAILABLE, "down; why".to_owned())
    );
    let dir = dir();
    let path = dir.path().join("gone");
    let text = format!("{nothing}fork/exec {}: no such file or directory", path.display());
    assert_eq!(execute_plugin(&call(&path, b"")).unwrap_err().to_string(), text);
}

#[test]
fn large_streams_do_not_deadlock_in_any_order() {
    let megabyte = vec![b'x'; 1 << 20];
    // Not read at all, read only after much was written, echoed while it arrives.
    assert_eq!(run("exit 0", &megabyte).unwrap(), b"");
    let late = "head -c 1048576 /dev/zero; head -c 1048576 /dev/zero >&2; cat";
    assert_eq!(run(late, &megabyte).unwrap().len(), 2 << 20);
    assert_eq!(run("cat", &megabyte).unwrap(), megabyte);
    assert_eq!(run("exec <&-; echo done", &megabyte).unwrap(), b"done\n");
}

#[test]
fn stderr_is_forwarded_whole_while_the_plugin_runs() {
    let dir = dir();
    let path = script(dir.path(), "p", "echo one >&2; sleep 0.4; head -c 300000 /dev/zero >&2");
    let mut seen = Arrivals::default();
    execute_with_stderr(&call(&path, b""), &mut seen).unwrap();
    let (first, last) = (&seen.0[0], seen.0.last().unwrap());
    assert_eq!(first.1, b"one\n");
    assert!(last.0 - first.0 > Duration::from_millis(300), "held back until the end");
    assert_eq!(seen.0.iter().map(|(_, bytes)| bytes.len()).sum::<usize>(), 300_004);
}

#[test]
fn stderr_of_a_failing_plugin_reaches_our_stderr() {
    if env::var_os("CNIBOX_TEST_CHILD").is_some() {
        let dir = dir();
        let path = script(dir.path(), "p", "echo told >&2; echo '{\"msg\":\"m\"}'; exit 1");
        execute_plugin(&call(&path, b"")).unwrap_err();
        return;
    }
    let name = "exec::tests::stderr_of_a_failing_plugin_reaches_our_stderr";
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("CNIBOX_TEST_CHILD", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr).matches("told\n").count(), 1);
}

#[test]
fn a_plugin_is_killed_at_the_deadline() {
    let dir = dir();
    // The sleeping grandchild keeps the pipes open beyond the plugin's death.
    for body in ["sleep 30", "exec sleep 30", "exec >&- 2>&-; sleep 30"] {
        let path = script(dir.path(), "p", body);
        let call =
            PluginCommand { deadline: Some(Duration::from_millis(200)), ..call(&path, b"{}") };
        let started = Instant::now();
        let error = execute_with_stderr(&call, &mut io::sink()).unwrap_err();
        assert_eq!(error.message(), "netplugin failed with no error message: signal: killed");
        assert!(started.elapsed() < Duration::from_secs(5), "{body}");
    }
}

#[test]
fn output_of_a_background_child_is_read() {
    let said = run("(sleep 0.2; echo late) & echo early", b"").unwrap();
    assert_eq!(said, b"early\nlate\n");
}

#[test]
fn executing_a_busy_file_is_retried() {
    let dir = dir();
    // The kernel refuses a real executable; a script's interpreter would not be busy everywhere.
    let path = dir.path().join("p");
    fs::copy("/bin/true", &path).unwrap();
    let writer = OpenOptions::new().append(true).open(&path).unwrap();
    let closes = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(writer);
    });
    let started = Instant::now();
    assert_eq!(execute_plugin(&call(&path, b"")).unwrap(), b"");
    assert!(started.elapsed() >= Duration::from_millis(250), "the file was never busy");
    closes.join().unwrap();
    let _writer = OpenOptions::new().append(true).open(&path).unwrap();
    let brief = PluginCommand { deadline: Some(Duration::from_millis(50)), ..call(&path, b"") };
    assert!(execute_plugin(&brief).unwrap_err().message().ends_with(": text file busy"));
}

#[test]
fn results_are_parsed_and_invalid_ones_refused() {
    let read = |text: &str| read_result(text.as_bytes(), SpecVersion::V1_0_0);
    assert_eq!(read("{}").unwrap().version, SpecVersion::V1_0_0);
    assert_eq!(read("null").unwrap().version, SpecVersion::V1_0_0);
    assert_eq!(read(r#"{"cniVersion":""}"#).unwrap().version, SpecVersion::V1_0_0);
    assert_eq!(read(r#"{"cniVersion":"0.4.0"}"#).unwrap().version, SpecVersion::V0_4_0);
    for bad in ["", "[]", "x", "{} {}"] {
        let error = read(bad).unwrap_err();
        assert!(error.message().starts_with("failed to unmarshal raw result: "), "{bad}: {error}");
    }
}

fn version_of(body: &str) -> Result<VersionInfo> {
    let dir = dir();
    let path = script(dir.path(), "p", body);
    query_version_info(&ProcessExecutor, &path, Some(Duration::from_secs(20)))
}

#[test]
fn version_replies_are_parsed() {
    let info = version_of(r#"echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}'"#);
    assert!(
        info.as_ref().unwrap().supports_version("0.4.0") && !info.unwrap().supports_version("0.4")
    );
    assert!(version_of(r#"echo '{"cniVersion":"0.2.0"}'"#).unwrap().supports_version(""));
    let old = version_of(r#"echo '{"code":4,"msg":"unknown CNI_COMMAND: VERSION"}'; exit 1"#);
    assert_eq!(old.unwrap().supported_versions, ["0.1.0"]);
    for (said, why) in [
        ("{}", "missing field cniVersion"),
        (r#"{"cniVersion":"1.0.0"}"#, "missing field supportedVersions"),
        (r#"{"cniVersion":"1.0.0","supportedVersions":[]}"#, "missing field supportedVersions"),
        ("[]", "expected an object, found a list"),
    ] {
        let error = version_of(&format!("echo '{said}'")).unwrap_err();
        assert_eq!(error.message(), format!("decoding version info: {why}"));
    }
    let env = r#"[ "$CNI_COMMAND$CNI_NETNS$CNI_IFNAME$CNI_PATH" = VERSIONdummydummydummy ] || exit 9
        [ "$(cat)" = '{"cniVersion":"1.1.0"}' ] || exit 8
        echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}'"#;
    assert!(version_of(env).unwrap().supports_version("1.1.0"));
}
