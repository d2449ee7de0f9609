#!/usr/bin/env python3
"""multus.py [ROOT]: a plugin that does what multus 4.3 does without an API server: attaches a pod to each network in
"delegates", with a cache of its own. ROOT is the root in which the daemon of the thick plugin starts its delegates."""

import json
import os
import sys

from libcni import Attachment, Failed, Library, load

VERSIONS = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]


class Multus:
    def __init__(self, conf, root):
        self.directory = conf.get("cniDir", "/var/lib/cni/multus")
        self.delegates = [load(json.dumps(delegate)) for delegate in conf["delegates"]]
        self.capabilities = conf.get("runtimeConfig", {})
        self.id, self.ifname, self.netns = (os.environ["CNI_" + name] for name in ("CONTAINERID", "IFNAME", "NETNS"))
        pairs = [pair.split("=", 1) for pair in os.environ.get("CNI_ARGS", "").split(";") if pair]
        given = dict(pairs)
        self.args = [("IgnoreUnknown", "true")] + [(name, given.get(name, "")) for name in (
            "K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID")]
        path = [conf.get("binDir", "/opt/cni/bin"), *os.environ["CNI_PATH"].split(":")]
        self.library = Library(path, self.directory, root)

    def saved(self):
        """The file of the pod's networks; DEL uses what ADD has written."""
        return os.path.join(self.directory, self.id)

    def attachments(self):
        for number, network in enumerate(self.delegates):
            ifname = f"net{number}" if number else self.ifname
            yield network, Attachment(self.id, self.netns, ifname, self.args, self.capabilities)

    def add(self):
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        with open(self.saved(), "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump([network[1] for network in self.delegates], file)
        results = []
        for network, of in self.attachments():
            try:
                results.append(self.library.add(network, of))
            except Failed:
                self.delete_first(len(results) + 1)
                raise
        return results[0]

    def delete_first(self, count):
        failed = []
        for network, of in reversed(list(self.attachments())[:count]):
            try:
                self.library.delete(network, of)
            except Failed as error:
                failed.append(str(error))
        return failed

    def delete(self):
        if not os.path.exists(self.saved()):
            return
        with open(self.saved(), encoding="utf-8") as file:
            self.delegates = [load(text) for text in json.load(file)]
        failed = self.delete_first(len(self.delegates))
        os.remove(self.saved())
        if failed:
            raise Failed(" / ".join(failed))

    def check(self):
        for network, of in self.attachments():
            self.library.check(network, of)

    def status(self):
        """Of the cluster's network only."""
        self.library.status(self.delegates[0])

    def collect(self):
        """GC of the cluster's network only, with all that is in the cache, whatever the runtime's list says."""
        valid = []
        for name in sorted(os.listdir(os.path.join(self.directory, "results"))):
            with open(os.path.join(self.directory, "results", name), encoding="utf-8") as file:
                cached = json.load(file)
            valid.append((cached["containerId"], cached["ifName"]))
        self.library.collect(self.delegates[0], valid)


def main(root=None):
    command, conf = os.environ["CNI_COMMAND"], json.load(sys.stdin)
    if command == "VERSION":
        print(json.dumps({"cniVersion": "1.1.0", "supportedVersions": VERSIONS}))
        return 0
    try:
        multus = Multus(conf, root)
        commands = {"ADD": multus.add, "CHECK": multus.check, "DEL": multus.delete, "STATUS": multus.status, "GC": multus.collect}
        result = commands[command]()
    except (Failed, OSError) as error:
        print(json.dumps({"cniVersion": conf["cniVersion"], "code": 999, "msg": str(error)}))
        return 1
    if result is not None:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
