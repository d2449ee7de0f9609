//! docs/plugins/ compared with the source: each plugin has a page, the page documents each
//! configuration key, and each documented key exists. The keys are read from the structs that
//! derive `Deserialize`. Also the consistency of the pages: links resolve, the book contains every
//! page, repeated figures agree.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};

use cnibox::testing::APPLETS;
use cnibox::testing::{Applet, AppletKind};
use cnibox_tests::root;

/// The required parts of a page, in this order: an example, and headings.
const SECTIONS: [&str; 6] =
    ["```json", "## On the host", "## Keys", "## Differences", "## Errors", "## Kernel"];

fn plugins() -> impl Iterator<Item = &'static str> {
    APPLETS.iter().filter(|applet| applet.kind != AppletKind::Tool).map(|applet| applet.name)
}

fn page(name: &str) -> String {
    let path = root().join("docs/plugins").join(format!("{name}.md"));
    fs::read_to_string(&path).unwrap_or_else(|_| {
        let sections = SECTIONS.join("`, `");
        panic!("write docs/plugins/{name}.md: `# {name}`, a paragraph, `{sections}`")
    })
}

/// The lists of the documentation are those of the table in `src/applets.rs`; `make lists` writes
/// them.
#[test]
fn the_lists_of_applets_are_those_of_the_table() {
    let row =
        |applet: &Applet| format!("| `{}` | {} | {} |\n", applet.name, applet.kind, applet.about);
    let rows: String = APPLETS.iter().map(row).collect();
    let entries: String =
        plugins().map(|name| format!("  - [{name}](plugins/{name}.md)\n")).collect();
    let lists = [
        ("README.md", "| name | kind | what it does |\n| --- | --- | --- |\n", "\n[", rows),
        ("docs/SUMMARY.md", "- [Plugins](plugins/README.md)\n", "- [", entries),
    ];
    for (file, before, after, list) in lists {
        let path = root().join(file);
        let text = fs::read_to_string(&path).unwrap();
        let (head, rest) = text.split_once(before).unwrap();
        let tail =
            rest.lines().skip_while(|line| line.starts_with("| ") || line.starts_with("  - "));
        let tail = tail.map(|line| format!("{line}\n")).collect::<String>();
        assert!(tail.starts_with(after), "{file}: {tail}");
        let written = [head, before, &list, &tail].concat();
        if std::env::var_os("CNIBOX_WRITE_LISTS").is_some() {
            fs::write(&path, &written).unwrap();
        }
        assert!(
            written == text,
            "{file}: its list of applets is not that of src/applets.rs: make lists"
        );
    }
}

/// A configuration key and the struct that reads it.
#[derive(Debug)]
struct Key {
    name: String,
    place: String,
}

/// The sources of a plugin.
fn files_of_plugin(name: &str) -> Vec<PathBuf> {
    let module = name.replace('-', "_");
    let file = root().join("src/plugins").join(format!("{module}.rs"));
    let mut files = if file.is_file() { vec![file] } else { Vec::new() };
    // dhcp is beside the plugins.
    let directories = ["src/plugins", "src"].map(|parent| root().join(parent).join(&module));
    for entries in directories.iter().filter_map(|directory| fs::read_dir(directory).ok()) {
        files.extend(entries.map(|entry| entry.unwrap().path()));
    }
    assert!(!files.is_empty(), "no source of {name}");
    files.retain(|file| file.extension().is_some_and(|it| it == "rs"));
    files
}

/// The keys of the structs in a plugin's files.
fn keys_of_plugin(name: &str) -> Vec<Key> {
    files_of_plugin(name).iter().flat_map(keys_of).collect()
}

/// The keys of the common structs that a plugin's files use.
fn common_keys_of_plugin(name: &str) -> Vec<Key> {
    let texts: String =
        files_of_plugin(name).iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let mut keys = keys_of(&root().join("crates/cni/src/config.rs"));
    keys.retain(|key| {
        let item = key.place.split([' ', '<']).nth(1).unwrap();
        texts.contains(&format!(": {item}"))
    });
    keys
}

fn keys_of(file: &PathBuf) -> Vec<Key> {
    let text = fs::read_to_string(file).unwrap();
    let place = file.strip_prefix(root()).unwrap().display().to_string();
    let keys = keys(&text).into_iter();
    keys.map(|(name, item)| Key { name, place: format!("struct {item} in {place}") }).collect()
}

/// Key and struct of every field of the structs in `text` that derive `Deserialize`.
fn keys(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        // A struct that is also serialized is a state file, not a configuration.
        let read = line.trim_start().starts_with("#[derive(") && line.contains("Deserialize");
        if !read || line.contains(" Serialize") {
            continue;
        }
        let mut attributes = String::new();
        let item = lines.by_ref().find(|line| {
            attributes += line;
            line.contains("struct ") || line.contains("enum ")
        });
        let Some((_, item)) = item.and_then(|line| line.split_once("struct ")) else { continue };
        if !item.ends_with('{') {
            continue;
        }
        let item = item.trim_end_matches(['{', ' ']).to_owned();
        let camel = attributes.contains("rename_all = \"camelCase\"");
        let mut attribute = String::new();
        for line in lines.by_ref().map(str::trim).take_while(|line| *line != "}") {
            if line.starts_with("//") {
                continue;
            }
            if line.starts_with("#[") || !attribute.is_empty() && !attribute.ends_with(']') {
                attribute += line;
                continue;
            }
            if let Some((field, _)) = line.split_once(':') {
                let field = field.rsplit(' ').next().unwrap();
                let is_skipped = ["(skip)", "skip_deserializing", "flatten"]
                    .iter()
                    .any(|s| attribute.contains(s));
                if !is_skipped {
                    let key = renamed(&attribute).unwrap_or_else(|| written(field, camel));
                    found.push((key, item.clone()));
                }
            }
            attribute.clear();
        }
    }
    found
}

fn renamed(attribute: &str) -> Option<String> {
    let (_, rest) = attribute.split_once("rename = \"")?;
    Some(rest.split('"').next()?.to_owned())
}

fn written(field: &str, camel: bool) -> String {
    let field = field.trim_start_matches("r#");
    if !camel {
        return field.to_owned();
    }
    let mut parts = field.split('_');
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |name, part| {
        let (head, tail) = part.split_at(usize::from(!part.is_empty()));
        name + &head.to_uppercase() + tail
    })
}

/// The words in a page's code spans: `ipam.ranges` yields `ipam` and `ranges`.
fn words(text: &str) -> Vec<&str> {
    let spans = text.split('`').skip(1).step_by(2);
    spans
        .flat_map(|span| span.split(|c: char| !(c.is_alphanumeric() || "_-/".contains(c))))
        .collect()
}

/// The keys in the first column of a page's tables: the last word of each span.
fn listed(page: &str) -> Vec<&str> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let spans = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    spans.filter_map(|span| span.rsplit(['.', ']']).next()).collect()
}

#[test]
fn every_plugin_has_a_page_of_the_same_shape() {
    for name in plugins() {
        let page = page(name);
        assert_eq!(page.lines().next(), Some(format!("# {name}").as_str()), "{name}.md");
        let places: Vec<_> = SECTIONS.iter().map(|section| page.find(section)).collect();
        let complete = places.iter().all(Option::is_some) && places.is_sorted();
        assert!(complete, "docs/plugins/{name}.md needs, in this order: {SECTIONS:?}");
    }
}

#[test]
fn every_key_is_documented() {
    let mut missing = Vec::new();
    for name in plugins() {
        let page = page(name);
        let words = words(&page);
        for key in keys_of_plugin(name) {
            if !words.contains(&key.name.as_str()) {
                let Key { name: key, place } = key;
                missing.push(format!(
                    "docs/plugins/{name}.md: add the row \"| `{key}` | type | default | what |\" ({place})"
                ));
            }
        }
    }
    let common = fs::read_to_string(root().join("docs/plugins/README.md")).unwrap();
    for key in keys_of(&root().join("crates/cni/src/config.rs")) {
        if !words(&common).contains(&key.name.as_str()) {
            missing.push(format!("docs/plugins/README.md: `{}` ({})", key.name, key.place));
        }
    }
    assert!(missing.is_empty(), "undocumented keys:\n  {}", missing.join("\n  "));
}

#[test]
fn every_documented_key_exists() {
    let mut stale = Vec::new();
    for name in plugins() {
        let keys: Vec<Key> =
            keys_of_plugin(name).into_iter().chain(common_keys_of_plugin(name)).collect();
        for key in listed(&page(name)) {
            if !keys.iter().any(|known| known.name == key) {
                stale.push(format!("docs/plugins/{name}.md: `{key}` is read nowhere"));
            }
        }
    }
    assert!(stale.is_empty(), "keys that are no more:\n  {}", stale.join("\n  "));
}

#[test]
fn files_named_in_the_architecture_exist() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let is_file = |word: &&str| Path::new(word).extension().is_some_and(|it| it == "rs");
    let files = text.split('`').filter(is_file);
    let [sources, tests] = [root().join("src"), root().to_owned()];
    let is_lost = |file: &&str| !sources.join(file).exists() && !tests.join(file).exists();
    let lost: Vec<_> = files.filter(is_lost).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

/// `egress` of `cnibox egress ls`.
fn first_word(command: &str) -> &str {
    command.trim_start_matches("cnibox ").split(' ').next().unwrap_or_default()
}

/// The table of the tools' options has each option in the row of its tools, and no other.
#[test]
fn the_operator_guide_lists_every_option_of_every_tool() {
    let text = fs::read_to_string(root().join("docs/operator.md")).unwrap();
    let section = text.split("## Tools and their options").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows: Vec<(Vec<&str>, Vec<&str>)> = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').collect();
            (words(cells[1]), words(cells[2]))
        })
        .collect();
    let tools = cnibox::testing::options::flags_by_tool();
    for (command, flags) in &tools {
        let tool = first_word(command);
        for flag in flags.iter().filter(|flag| !["--help", "--version"].contains(flag)) {
            let is_row = |(options, tools): &(Vec<&str>, Vec<&str>)| {
                options.contains(flag) && tools.contains(&tool)
            };
            let is_old = tool == "install" && *flag == "--watch";
            assert!(is_old || rows.iter().any(is_row), "docs/operator.md: {tool} {flag}");
        }
    }
    for (options, of) in &rows {
        for flag in options.iter().filter(|word| word.starts_with("--")) {
            let has = |(command, flags): &(&str, Vec<&str>)| {
                flags.contains(flag) && of.contains(&first_word(command))
            };
            assert!(tools.iter().any(has), "docs/operator.md: no tool of its row has {flag}");
        }
    }
}

#[test]
fn the_image_guide_lists_every_plugin() {
    let text = fs::read_to_string(root().join("docs/image-builder.md")).unwrap();
    for name in plugins() {
        let row = format!("| `{name}` |");
        assert!(
            text.contains(&row),
            "docs/image-builder.md: add the row \"{row} kernel | files |\""
        );
    }
}

/// The fixed parts of a message in the operators' table, without placeholders.
fn fixed_parts(message: &str) -> Vec<&str> {
    let variable = ["...", "/x", " x", " X", " Y", "\"x\""];
    let mut parts = vec![message];
    for text in variable {
        parts = parts.into_iter().flat_map(|part| part.split(text)).collect();
    }
    parts.into_iter().map(|part| part.trim_matches([' ', ':', '[', ']', '/'])).collect()
}

/// The text of all sources, with escaped quotes unescaped.
fn sources(dir: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text += &sources(&path);
        } else {
            text += &fs::read_to_string(&path).unwrap();
        }
    }
    text.replace("\\\"", "\"")
}

/// The messages with a fixed part that occurs nowhere in the sources, and that part.
fn unsaid<'t>(messages: impl Iterator<Item = &'t str>) -> Vec<(&'t str, &'t str)> {
    // Texts of kernel errors.
    const ERRNO: [&str; 8] = [
        "Unknown device type",
        "invalid argument",
        "no space left on device",
        "read-only file system",
        "permission denied",
        "no such file or directory",
        "address already in use",
        "file exists",
    ];
    let sources =
        ["src", "crates/cni/src"].map(|directory| sources(&root().join(directory))).concat();
    let parts =
        messages.flat_map(|message| fixed_parts(message).into_iter().map(move |p| (message, p)));
    parts.filter(|(_, part)| !ERRNO.contains(part) && !sources.contains(part)).collect()
}

#[test]
fn the_operator_guide_quotes_existing_messages() {
    let page = fs::read_to_string(root().join("docs/operator.md")).unwrap();
    let table = page.split("| message |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells: Vec<_> = rows.map(|row| row.split('|').nth(1).unwrap()).collect();
    assert!(cells.len() >= 10, "{cells:?}");
    let lost = unsaid(cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)));
    assert!(lost.is_empty(), "docs/operator.md: nothing says {lost:#?}");
}

#[test]
fn plugin_pages_quote_existing_errors() {
    let pages: String = plugins().chain(["README"]).map(page).collect();
    let sections = pages.split("\n## ").filter(|section| section.starts_with("Errors"));
    let items = sections.flat_map(|section| section.split("\n- ").skip(1));
    let lost = unsaid(items.filter_map(|item| item.split('`').nth(1)));
    assert!(lost.is_empty(), "docs/plugins/*.md: nothing says {lost:#?}");
}

#[test]
fn every_file_names_the_version_of_the_manifest() {
    let version = env!("CARGO_PKG_VERSION");
    let places = [
        ("packaging/kubernetes/base/kustomization.yaml", format!("    newTag: {version}\n")),
        (
            "packaging/helm/cnibox/Chart.yaml",
            format!("\nversion: {version}\nappVersion: {version}\n"),
        ),
    ];
    for (path, line) in places {
        let manifest = fs::read_to_string(root().join(path)).unwrap();
        assert!(manifest.contains(&line), "{path}: {line}");
    }
}

/// The paths of the pages in the root directory and below docs/.
fn pages() -> Vec<PathBuf> {
    fn below(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                below(&path, found);
            } else if path.extension().is_some_and(|it| it == "md") {
                found.push(path);
            }
        }
    }
    let names = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "MAINTAINERS.md", "SECURITY.md"];
    let mut found: Vec<_> = names.iter().map(|name| root().join(name)).collect();
    below(&root().join("docs"), &mut found);
    found
}

/// The page without code blocks and code spans.
fn prose(text: &str) -> String {
    let blocks = text.split("```").step_by(2).collect::<String>();
    let lines = blocks.lines().filter(|line| !line.starts_with("    "));
    lines.map(|line| line.split('`').step_by(2).collect::<String>() + "\n").collect()
}

/// The targets of a page's links and images.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let marks = [("](", ')'), ("src=\"", '"')];
    let ends = marks.into_iter().flat_map(|(start, end)| {
        prose.split(start).skip(1).map(move |rest| rest.split(end).next().unwrap().to_owned())
    });
    ends.filter(|link| !link.starts_with("http")).collect()
}

/// The anchors of a page's headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
            let text: String = line.trim_matches(['#', ' ']).chars().filter(kept).collect();
            text.to_lowercase().replace(' ', "-")
        })
        .collect()
}

#[test]
fn links_between_pages_are_valid() {
    let mut dead = Vec::new();
    for page in pages().into_iter().chain([root().join("crates/cni-sanity/README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target =
                if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let is_there = target.exists()
                && (anchor.is_empty()
                    || anchors(&fs::read_to_string(&target).unwrap())
                        .iter()
                        .any(|known| known == anchor));
            if !is_there {
                dead.push(format!("{}: {link}", page.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(dead.is_empty(), "links to nothing:\n  {}", dead.join("\n  "));
}

#[test]
fn links_of_a_page_are_found() {
    let text =
        "a [b](c.md#d-e) `[x](no)` ![p](q.svg)\n```\n[x](no)\n```\n    [x](no)\n<img src=\"r\">";
    assert_eq!(links(text), ["c.md#d-e", "q.svg", "r"]);
    assert_eq!(anchors("# The `keys` of 1.0, and more\ntext"), ["the-keys-of-10-and-more"]);
}

#[test]
fn the_book_has_every_page() {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let listed: Vec<_> =
        links(&summary).iter().map(|link| root().join("docs").join(link)).collect();
    let is_listed = |page: &Path| {
        let page = fs::canonicalize(page).unwrap();
        listed.iter().any(|known| fs::canonicalize(known).is_ok_and(|known| known == page))
    };
    for page in pages().iter().filter(|page| !page.ends_with("SUMMARY.md")) {
        let name = page.strip_prefix(root()).unwrap().display();
        assert!(is_listed(page), "docs/SUMMARY.md: add a line for {name}");
    }
}

#[test]
fn the_readme_has_the_figures_of_the_scoreboard() {
    let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
    let (readme, sanity) =
        (read("README.md") + &read("docs/comparison.md"), read("docs/cni-sanity.md"));
    let board = sanity.split("| plugins | required |").nth(1).unwrap();
    for side in ["cnibox", "reference", "k3s"] {
        let row = board.lines().find(|line| line.starts_with(&format!("| {side}"))).unwrap();
        let required = row.split('|').nth(2).unwrap().trim();
        assert!(
            readme.contains(required),
            "README.md: {side} has {required} in docs/cni-sanity.md"
        );
    }
    let rust = env!("CARGO_PKG_RUST_VERSION");
    assert!(readme.contains(&format!("Rust {rust} or newer")), "README.md: Rust {rust} or newer");
}

#[test]
fn pages_name_the_repository_of_the_manifest() {
    let repository = env!("CARGO_PKG_REPOSITORY");
    for name in ["README.md", "MAINTAINERS.md"] {
        let page = fs::read_to_string(root().join(name)).unwrap();
        assert!(page.contains(repository), "{name}: {repository}");
    }
}

#[test]
fn keys_of_configuration_structs_are_found() {
    let text = "
#[derive(Debug, Deserialize)]
#[serde(rename_all = \"camelCase\", default)]
pub struct Conf {
    /// A comment: not a field.
    pub is_gateway: bool,
    #[serde(rename = \"hostIP\")]
    host_ip: String,
    #[serde(
        deserialize_with = \"x\",
        default
    )]
    pub(super) conditions_v4: Vec<String>,
    #[serde(skip)]
    own: u8,
}
#[derive(Clone, Deserialize)]
struct Plain { }
#[derive(Deserialize)]
struct Snake {
    a_b: u8,
}
#[derive(Deserialize, Serialize)]
struct State {
    nor_me: u8,
}
#[derive(Clone)]
struct Other {
    not_me: u8,
}
";
    let names: Vec<_> = keys(text).into_iter().map(|(key, _)| key).collect();
    assert_eq!(names, ["isGateway", "hostIP", "conditionsV4", "a_b"]);
    assert_eq!(listed("| `ipam.x` | y |\n| `a[].b`, `c` | `no` |\ntext `d`"), ["x", "b", "c"]);
    let bridge: Vec<_> = keys_of_plugin("bridge").into_iter().map(|key| key.name).collect();
    for key in ["bridge", "macspoofchk", "minID", "vlanTrunk"] {
        assert!(bridge.iter().any(|name| name == key), "{key}: {bridge:?}");
    }
}

/// The library in `crates/cni` shows each public function in use.
#[test]
fn each_function_of_the_library_has_an_example() {
    let mut lacking = Vec::new();
    let mut functions = 0;
    let mut open = vec![root().join("crates/cni/src")];
    while let Some(directory) = open.pop() {
        let module = ["lib.rs", "mod.rs"]
            .map(|name| directory.join(name))
            .into_iter()
            .find(|file| file.exists());
        let module = module.map_or(String::new(), |file| fs::read_to_string(file).unwrap());
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy();
            let is_hidden = module.contains(&format!("#[doc(hidden)]\npub mod {name};\n"));
            if is_hidden || name == "tests" {
                continue;
            }
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let mut docs = String::new();
            for line in text.lines().map(str::trim) {
                if line.starts_with("pub fn ") {
                    functions += 1;
                    if !docs.contains("```") && !docs.contains("#[doc(hidden)]") {
                        lacking.push(format!("{}: {line}", path.display()));
                    }
                }
                if line.starts_with("///") || line.starts_with("#[") || line.starts_with("// ") {
                    docs += line;
                } else {
                    docs.clear();
                }
            }
        }
    }
    assert!(functions > 80, "{functions}");
    assert!(
        lacking.is_empty(),
        "functions without an example in their documentation:\n  {}",
        lacking.join("\n  ")
    );
}
