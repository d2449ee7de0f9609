#!/usr/bin/env python3
"""The calls that the library of runtimes, libcni 1.3, makes of plugins, with its cache of results; for imitations of
runtimes that are not installed.

  libcni.py add FILE CACHE ID NETNS IFNAME   attach to the network of a file
  libcni.py check NETWORK CACHE ID IFNAME    CHECK of an attachment, with the configuration and the result in the cache
  libcni.py del FILE CACHE ID NETNS IFNAME   the end of the attachment
  libcni.py gc FILE KEY [ID:IFNAME]...       GC of each plugin with the list of valid attachments under one key only:
                                             libcni 1.2.0 wrote cni.dev/valid-attachments, later ones write
                                             cni.dev/attachments, too"""

import base64
import json
import os
import subprocess
import sys

CACHE = "/var/lib/cni"
PATH = ["/opt/cni/bin"]
KEYS = ("cni.dev/valid-attachments", "cni.dev/attachments")


class Failed(Exception):
    """What a plugin has answered; the text is that of Go's types.Error."""


class Attachment:
    """What libcni calls RuntimeConf."""

    def __init__(self, id, netns, ifname, args=(), capabilities=None):
        self.id, self.netns, self.ifname = id, netns, ifname
        self.args = [list(pair) for pair in args]
        self.capabilities = capabilities or {}


NOBODY = Attachment("", "", "")


def load(text):
    """A list of plugins; a file of one plugin becomes a list of one, and the cache keeps the text of the file."""
    network = json.loads(text)
    if "plugins" not in network:
        network = {"name": network.get("name", ""), "cniVersion": network.get("cniVersion", ""), "plugins": [network]}
    return network, text


def is_at_least(network, wanted):
    version = network.get("cniVersion") or "0.1.0"
    return [int(part) for part in version.split(".")] >= [int(part) for part in wanted.split(".")]


def find(plugin, path):
    for directory in path:
        if os.path.isfile(os.path.join(directory, plugin)):
            return os.path.join(directory, plugin)
    raise Failed(f'failed to find plugin "{plugin}" in path {path}')


class Library:
    """CNIConfig with a cache directory. `chroot` is the root in which plugins are started."""

    def __init__(self, path=None, cache=CACHE, chroot=None, timeout=None):
        self.path, self.cache = path or PATH, cache
        self.chroot, self.timeout = chroot, timeout

    def execute(self, command, plugin, data, of=NOBODY):
        """All six variables are set; those that the command does not need are empty."""
        environment = {
            **os.environ,
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": of.id,
            "CNI_NETNS": of.netns,
            "CNI_ARGS": ";".join("=".join(pair) for pair in of.args),
            "CNI_IFNAME": of.ifname,
            "CNI_PATH": ":".join(self.path),
        }
        # As in Go the working directory stays outside of the root.
        enter = (lambda: os.chroot(self.chroot)) if self.chroot else None
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        done = subprocess.run([find(plugin, self.path)], env=environment, input=text, stdout=subprocess.PIPE, text=True,
                              timeout=self.timeout, preexec_fn=enter)
        if done.returncode == 0:
            return json.loads(done.stdout) if done.stdout.strip() else None
        try:
            error = json.loads(done.stdout)
            raise Failed("; ".join(filter(None, (error["msg"], error.get("details")))))
        except (ValueError, KeyError):
            raise Failed(f"netplugin failed: {done.stdout!r}") from None

    def configure(self, network, plugin, of, previous=None):
        data = {**plugin, "name": network["name"], "cniVersion": network["cniVersion"]}
        if previous is not None:
            data["prevResult"] = previous
        asked = [name for name, wanted in plugin.get("capabilities", {}).items() if wanted]
        given = {name: of.capabilities[name] for name in asked if name in of.capabilities}
        if given:
            data["runtimeConfig"] = given
        return data

    def file(self, name, of):
        return os.path.join(self.cache, "results", f"{name}-{of.id}-{of.ifname}")

    def cached(self, name, of):
        try:
            with open(self.file(name, of), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return None

    def cached_of(self, name):
        """The attachments in the cache of a network."""
        directory = os.path.join(self.cache, "results")
        for entry in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
            with open(os.path.join(directory, entry), encoding="utf-8") as file:
                it = json.load(file)
            if it.get("kind") == "cniCacheV1" and it["networkName"] == name:
                yield Attachment(it["containerId"], it.get("netns", ""), it["ifName"], it.get("cniArgs", ()), it.get("capabilityArgs"))

    def add(self, network, of):
        network, text = network
        result = None
        for plugin in network["plugins"]:
            result = self.execute("ADD", plugin["type"], self.configure(network, plugin, of, result), of)
        os.makedirs(os.path.join(self.cache, "results"), mode=0o700, exist_ok=True)
        cached = {"kind": "cniCacheV1", "containerId": of.id, "config": base64.b64encode(text.encode()).decode(),
                  "ifName": of.ifname, "networkName": network["name"], "netns": of.netns, "cniArgs": of.args,
                  "capabilityArgs": of.capabilities, "result": result}
        with open(self.file(network["name"], of), "w", encoding="utf-8", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            json.dump(cached, file)
        return result

    def check(self, network, of):
        network, _ = network
        previous = (self.cached(network["name"], of) or {}).get("result")
        if network.get("disableCheck") or not is_at_least(network, "0.4.0"):
            return
        for plugin in network["plugins"]:
            self.execute("CHECK", plugin["type"], self.configure(network, plugin, of, previous), of)

    def delete(self, network, of):
        network, _ = network
        previous = (self.cached(network["name"], of) or {}).get("result") if is_at_least(network, "0.4.0") else None
        for plugin in reversed(network["plugins"]):
            self.execute("DEL", plugin["type"], self.configure(network, plugin, of, previous), of)
        if os.path.exists(self.file(network["name"], of)):
            os.remove(self.file(network["name"], of))

    def collect(self, network, valid, keys=KEYS):
        """DEL of what the cache has and the list lacks, then GC. No list of a network in Go is null in JSON."""
        if network[0].get("disableGC"):
            return
        failed = []
        for of in list(self.cached_of(network[0]["name"])):
            if (of.id, of.ifname) not in valid:
                try:
                    self.delete(network, of)
                except Failed as error:
                    failed.append(f"failed to delete stale attachment {of.id} {of.ifname}: {error}")
        attachments = [{"containerID": id, "ifname": ifname} for id, ifname in valid] or None
        for plugin in network[0]["plugins"] if is_at_least(network[0], "1.1.0") else ():
            data = {**self.configure(network[0], plugin, NOBODY), **{key: attachments for key in keys}}
            try:
                self.execute("GC", plugin["type"], data)
            except Failed as error:
                failed.append(f"failed to GC plugin {plugin['type']}: {error}")
        if failed:
            raise Failed("\n".join(failed))

    def status(self, network):
        """The first failure ends it."""
        network, _ = network
        for plugin in network["plugins"] if is_at_least(network, "1.1.0") else ():
            self.execute("STATUS", plugin["type"], self.configure(network, plugin, NOBODY))

    def validate(self, network):
        network, _ = network
        for plugin in network["plugins"]:
            known = self.execute("VERSION", plugin["type"], {"cniVersion": "1.1.0"})["supportedVersions"]
            if network["cniVersion"] not in known:
                raise Failed(f"plugin {plugin['type']} does not support config version {network['cniVersion']!r}")


def read(path):
    with open(path, encoding="utf-8") as file:
        return load(file.read())


def of_cache(library, name, id, ifname):
    """An attachment as the cache has it, and its network with the configuration of the ADD."""
    cached = library.cached(name, Attachment(id, "", ifname))
    if not cached:
        return None, None
    of = Attachment(id, cached.get("netns", ""), ifname, cached.get("cniArgs") or (), cached.get("capabilityArgs"))
    return load(base64.b64decode(cached["config"]).decode()), of


def main(command, file, *words):
    if command == "gc":
        Library(cache="/nonexistent").collect(read(file), [tuple(word.split(":")) for word in words[1:]], words[:1])
        return
    library = Library(cache=words[0])
    if command == "check":
        library.check(*of_cache(library, file, *words[1:]))
        return
    action = {"add": library.add, "del": library.delete}[command]
    action(read(file), Attachment(*words[1:], args=[("IgnoreUnknown", "1")]))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Failed as error:
        sys.exit(str(error))
