//! The YAML files: each file parses, the workflows' Makefile targets exist, and their actions are
//! pinned. GitHub reports mistakes only when a workflow runs, those in the release workflow only on
//! release day.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;

use cnibox_tests::root;
use yaml_rust2::{Yaml, YamlLoader};

/// The files with these extensions below a directory of the repository, with their contents.
fn files(directory: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut directories = vec![root().join(directory)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|e| e == "yml" || e == "yaml") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found
}

/// The only document of a text.
fn parse(text: &str) -> Result<Yaml, String> {
    let mut documents = YamlLoader::load_from_str(text).map_err(|error| error.to_string())?;
    if documents.len() == 1 { Ok(documents.remove(0)) } else { Err("not one document".to_owned()) }
}

/// The targets of the Makefile that `make help` lists.
fn targets() -> Vec<String> {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let rules = makefile.lines().filter(|line| line.contains("## "));
    rules.filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
}

/// The defect of a command, if any: a command is the script of continuous integration, or `make`,
/// existing targets, and then variables.
fn wrong_command(command: &str, targets: &[String]) -> Option<String> {
    if command == ".ci/run" {
        return None;
    }
    let Some(words) = command.strip_prefix("make ") else {
        return Some(format!("runs something else than make: {command}"));
    };
    let unknown = words
        .split_whitespace()
        .take_while(|word| !word.contains('='))
        .find(|word| !targets.iter().any(|target| target == word))?;
    Some(format!("the Makefile has no target {unknown}"))
}

/// The defect of an action, if any: an action is pinned to a commit, with its release in a comment.
fn wrong_action(line: &str) -> Option<String> {
    let pinned = line.split_once('@').and_then(|(_, rest)| rest.split_once(" # "));
    let good = pinned.is_some_and(|(hash, release)| {
        hash.len() == 40 && hash.chars().all(|c| c.is_ascii_hexdigit()) && !release.is_empty()
    });
    (!good).then(|| format!("wants a commit and \"# its release\": {line}"))
}

fn mapping(yaml: &Yaml) -> impl Iterator<Item = (&str, &Yaml)> {
    let pairs = yaml.as_hash().into_iter().flatten();
    pairs.map(|(key, value)| (key.as_str().unwrap_or_default(), value))
}

/// The defect of a step, if any, besides those of its lines.
fn wrong_step(step: &Yaml, targets: &[String]) -> Option<String> {
    if let Some(command) = step["run"].as_str() {
        return wrong_command(command, targets);
    }
    let action = step["uses"].as_str().unwrap_or_default();
    let keeps_token = action.starts_with("actions/checkout@")
        && step["with"]["persist-credentials"].as_bool() != Some(false);
    keeps_token.then(|| "the checkout keeps the token: persist-credentials: false".to_owned())
}

/// All defects of a workflow.
fn faults(text: &str, targets: &[String]) -> Vec<String> {
    let workflow = match parse(text) {
        Ok(workflow) => workflow,
        Err(error) => return vec![error],
    };
    let uses = text.lines().filter_map(|line| line.split_once("uses: "));
    let mut found: Vec<String> = uses.filter_map(|(_, action)| wrong_action(action)).collect();
    let rights: Vec<_> = mapping(&workflow["permissions"]).collect();
    if !matches!(&rights[..], [("contents", right)] if right.as_str() == Some("read")) {
        found.push("the permissions of all jobs are not \"contents: read\"".to_owned());
    }
    if mapping(&workflow["jobs"]).next().is_none() {
        found.push("no jobs".to_owned());
    }
    for (name, job) in mapping(&workflow["jobs"]) {
        if job["timeout-minutes"].is_badvalue() {
            found.push(format!("{name}: no timeout-minutes"));
        }
        let steps = job["steps"].as_vec().into_iter().flatten();
        found.extend(steps.filter_map(|step| wrong_step(step, targets)));
    }
    found
}

#[test]
fn every_yaml_file_parses() {
    // Helm templates are not YAML before scripts/manifests.py renders them.
    let all = files(".github").into_iter().chain(files("packaging"));
    let all: Vec<_> = all.filter(|(name, _)| !name.contains("/templates/")).collect();
    assert!(all.len() >= 10, "{all:?}");
    for (name, text) in all {
        let documents = YamlLoader::load_from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(!documents.is_empty(), "{name} is empty");
    }
}

#[test]
fn workflows_call_targets_that_exist() {
    let targets = targets();
    for (name, text) in files(".github/workflows") {
        let found = faults(&text, &targets);
        assert!(found.is_empty(), "{name}:\n  {}", found.join("\n  "));
    }
}

#[test]
fn the_minimum_rust_version_is_that_of_the_workflow() {
    let workflow = fs::read_to_string(root().join(".github/workflows/ci.yml")).unwrap();
    let workflow = parse(&workflow).unwrap();
    let steps = workflow["jobs"]["msrv"]["steps"].as_vec().unwrap();
    let used = steps.iter().find_map(|step| step["with"]["toolchain"].as_str());
    let stated = env!("CARGO_PKG_RUST_VERSION");
    assert_eq!(used, Some(format!("{stated}.0").as_str()), "rust-version of Cargo.toml");
    let page = fs::read_to_string(root().join("docs/developer.md")).unwrap();
    assert!(page.contains(&format!("Rust {stated}")), "docs/developer.md: Rust {stated}");
}

#[test]
fn every_target_is_checked_and_released() {
    let table = fs::read_to_string(root().join("scripts/targets.txt")).unwrap();
    let targets: Vec<_> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    // Each runner has the library of its own target, with which x86-64 is not released.
    let others: Vec<_> = targets
        .into_iter()
        .filter(|word| !["#", "x86_64-unknown-linux-gnu"].contains(word))
        .collect();
    assert_eq!(others.len(), 6, "{others:?}");
    for file in [".github/workflows/ci.yml", ".github/workflows/release.yml", "deny.toml"] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let missing = others.iter().find(|target| !text.contains(*target));
        assert_eq!(missing, None, "{file}");
    }
}

#[test]
fn nothing_is_published_before_the_tests_in_a_fresh_root() {
    let workflow = fs::read_to_string(root().join(".github/workflows/release.yml")).unwrap();
    let jobs = &parse(&workflow).unwrap()["jobs"];
    let awaited = jobs["publish"]["needs"].as_vec().unwrap();
    let mut steps =
        awaited.iter().flat_map(|job| jobs[job.as_str().unwrap()]["steps"].as_vec().unwrap());
    assert!(steps.any(|step| step["run"].as_str() == Some("make test-fresh")));
}

#[test]
fn mistakes_in_workflows_are_found() {
    let good = "permissions:\n  contents: read\njobs:\n  a:\n    timeout-minutes: 5\n    steps:\n";
    let targets = ["lint".to_owned(), "test".to_owned()];
    let faults = |steps: &str| faults(&format!("{good}{steps}"), &targets);
    let pin = "0123456789012345678901234567890123456789";
    assert_eq!(faults("      - run: make lint test ARGS=x\n"), [""; 0]);
    assert_eq!(faults(&format!("      - uses: a/b@{pin} # v1\n")), [""; 0]);
    for (steps, what) in [
        ("      - run: make lint nothing\n", "no target nothing"),
        ("      - run: cargo test\n", "else than make"),
        ("      - uses: a/b@v1 # v1\n", "wants a commit"),
        (&format!("      - uses: a/b@{pin}\n"), "wants a commit"),
        (&format!("      - uses: actions/checkout@{pin} # v1\n"), "keeps the token"),
        ("      - run: make lint\n        run: make test\n", "duplicate"),
        ("  b:\n    steps: []\n", "b: no timeout"),
    ] {
        let found = faults(steps);
        assert!(found.len() == 1 && found[0].contains(what), "{steps}{found:?}");
    }
    let wide = good.replace("contents: read", "contents: write");
    assert_eq!(self::faults(&wide, &targets).len(), 1);
    assert_eq!(self::faults("permissions:\n  contents: read\n", &targets), ["no jobs"]);
}
