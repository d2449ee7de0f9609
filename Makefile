# The entry point of every task; what takes more than a few lines is in scripts/, tests/ and packaging/.

CARGO   ?= cargo
HOST    := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
# On x86-64 musl instead of glibc where its standard library is installed (docs/decisions/0014-before-main.md).
ifneq ($(and $(filter x86_64-%,$(HOST)),$(wildcard $(shell rustc --print sysroot 2>/dev/null)/lib/rustlib/x86_64-unknown-linux-musl/lib)),)
HOST    := x86_64-unknown-linux-musl
endif
TARGET  ?= $(HOST)
TARGETS ?= $(TARGET)
# The targets of a release; TARGETS=all stands for them, ARCH=s390x for TARGET=s390x-unknown-linux-gnu.
ALL     := $(filter-out $(if $(filter x86_64-%-gnu,$(HOST)),%-musl,x86_64-%-gnu),$(shell sed 's/^\#.*//; s/ .*//' scripts/targets.txt))
# Go's name of a target's architecture.
go_of    = $(shell awk '$$1 == "$(1)" { print $$4 }' scripts/targets.txt)
ifeq ($(TARGETS),all)
override TARGETS := $(ALL)
endif
ifeq ($(origin ARCH),command line)
TARGET  := $(filter $(ALL),$(shell awk '$$2 == "$(ARCH)" { print $$1 }' scripts/targets.txt))
endif
PREFIX  ?= /opt/cni
BINDIR  ?= $(PREFIX)/bin
DESTDIR ?=
PEER    ?= /usr/lib/cni
ARGS    ?=
ROUNDS  ?= 3
SEED    ?= $(shell date -u +%Y%m%d)
MINUTES ?= 60
WORKERS ?= 64
PLUGIN  ?= ptp

# Static and position independent; the cost is in docs/decisions/0014-before-main.md.
STATIC  := -C target-feature=+crt-static
# The software implementation of SHA-512: for a few bytes, CPUID, which traps under a hypervisor, costs more than
# the hash.
STATIC  += --cfg sha2_backend="soft" --cfg sha2_backend_soft="compact"
# Relative relocations in the packed format DT_RELR save 120 kB. glibc applies them to static executables since 2.36.
ifeq ($(shell printf '%s\n' 2.36 "$$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)" | sort -CV && echo yes),yes)
STATIC  += -C link-arg=-Wl,-z,pack-relative-relocs
endif
# Frame pointers make the unwind tables a quarter smaller (190 kB); perf and bpf can walk complete stacks.
STATIC  += -C force-frame-pointers=yes
# Reproducible output, independent of the paths of the source and the registry.
STATIC  += --remap-path-prefix=$(CURDIR)=cnibox
STATIC  += --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

# Directories of build output and of releases.
OUT     := $(or $(CARGO_TARGET_DIR),target)
BINARY  := $(OUT)/$(TARGET)/release/cnibox
DIST    ?= $(OUT)/dist
# "auditable build" embeds the list of dependencies in the executable.
BUILD   ?= build
# For tests and checks: the whole workspace, even for one test, as all of them share one build of the library.
WORKSPACE := --locked --workspace
# The timestamp in all released files: that of the last commit.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH
# Debian's cross linker; cargo finds the native one.
CARGO_TARGET := CARGO_TARGET_$(shell echo $(TARGET) | tr a-z- A-Z_)
ifneq ($(filter $(TARGET),$(filter-out $(HOST),$(ALL))),)
export $(CARGO_TARGET)_LINKER ?= $(shell awk '$$1 == "$(TARGET)" { print $$5 }' scripts/targets.txt)-gcc
endif

# The commit that `cnibox version` names; nothing for a source without git.
CNIBOX_COMMIT ?= $(shell [ ! -e .git ] || git rev-parse --short=12 HEAD 2>/dev/null)
build: export CNIBOX_COMMIT := $(CNIBOX_COMMIT)

# Maximum size of the stripped executable in bytes: 5.45 MB, of which the resolver of egress and names in policies are 0.3 MB;
# glibc is 0.65 MB of code.
SIZE_LIMIT := $(if $(filter %-musl,$(TARGET)),5450000,5850000)

.PHONY: run-demo run-test run-test-vm run-test-long run-soak run-record help list-dependencies deps build sanity check check-source demo test test-vm test-fresh test-long soak test-runtimes matrix test-kernels test-userlands test-arch lint lists arch bench size cross image dist reproduce book record package fuzz install clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

# Before the first compilation. The tasks of a developer (demo, test, lint, ...) install missing packages as root on
# Debian; DEPS=no lists them only. Building and installing change nothing on the machine.
.NOTPARALLEL:
prepare-%:
	@scripts/prepare.sh $*
list-dependencies:
	@DEPS=no scripts/prepare.sh $(if $(filter $(HOST),$(TARGET)),build,$(TARGET))
build sanity arch: list-dependencies
check-source: prepare-build

deps: prepare-test ## install what building and testing need, as root on Debian or Ubuntu; build and install only list it

# Copied in one write, as by the installer: newer kernels cache large writes in large folios, which cause a third fewer
# page faults than the file that the linker has written in pieces.
build: ## the static release binary, target/<target>/release/cnibox
	@[ -e $(BINARY) ] || echo "build: the first compile takes two minutes on two cores"
	RUSTFLAGS='$(STATIC)' $(CARGO) $(BUILD) --release --locked --bin cnibox --target $(TARGET)
	@install -m 755 /dev/null $(BINARY).new && dd if=$(BINARY) of=$(BINARY).new bs=64M status=none
	@mv $(BINARY).new $(BINARY)

sanity: ## the conformance suite for CNI plugins, target/<target>/release/cni-sanity
	RUSTFLAGS='$(STATIC)' $(CARGO) $(BUILD) --release --locked -p cni-sanity --target $(TARGET)

# Each task that installs dependencies runs in a make of its own, which sees a standard library that was installed:
# TARGET depends on it.
demo test test-vm test-long soak record: %: prepared-%
	@$(MAKE) --no-print-directory run-$*

.PHONY: prepared-demo prepared-test prepared-test-vm prepared-test-long prepared-soak prepared-record
prepared-demo prepared-record: prepare-demo
prepared-test prepared-test-vm prepared-test-long prepared-soak: prepare-test

demo: ## installs what is missing; two containers on one bridge in private namespaces: attach, inspect, ping, detach
run-demo: build
	@scripts/demo.sh $(BINARY)

check: check-source ## before each commit, 90 seconds after a small change: formatting, clippy, texts, unit tests, the integration tests of one plugin; PLUGIN=bridge
	$(CARGO) build $(WORKSPACE) --bins --examples
	$(CARGO) test $(WORKSPACE) --quiet --lib --bin cni-sanity
	$(CARGO) test $(WORKSPACE) --quiet --test it -- $(PLUGIN)::

# The part of "lint" that sees a change of a source or documentation file.
check-source:
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(WORKSPACE) --all-targets -- -D warnings
	$(CARGO) test $(WORKSPACE) --quiet --test arch --test docs --test words

# The release build links on one processor for two minutes; the tests are compiled beside it.
run-test: export CNIBOX_BIN := $(abspath $(BINARY))
test: ## installs what is missing; the demo, then the whole suite: on this kernel, and in a VM for features that this kernel lacks
run-test:
	@echo "test: compiles the program and the tests and runs them, about 20 minutes on two cores"
	scripts/lanes.sh build & $(MAKE) build; built=$$?; wait $$! && exit $$built
	scripts/demo.sh $(BINARY)
	scripts/lanes.sh host-and-vm
	[ "$(CNIBOX_NO_VM)" = 1 ] || tests/reboot.sh $(BINARY)

test-vm: ## only the tests of features that this kernel lacks, in a VM; ARGS=<pattern of test names>
run-test-vm: build
	CNIBOX_BIN=$(abspath $(BINARY)) scripts/lanes.sh vm $(ARGS)

test-fresh: ## the tests of the last commit in a minimal Debian root, as root with debootstrap: does scripts/prepare.sh name every program?
	scripts/prepare.sh fresh
	scripts/fresh-root.sh make test

test-long: ## the whole suite with the long tests, ROUNDS of the randomised tests, one minute of each fuzz target
run-test-long: build
	CNIBOX_LONG=$(ROUNDS) CNIBOX_VM_TIMEOUT=7200 CNIBOX_BIN=$(abspath $(BINARY)) scripts/lanes.sh host-and-vm
	scripts/fuzz.sh 60

soak: ## one node for MINUTES=60: WORKERS=64 attach to every plugin, beside kills, flushes and a full disk; SEED=<number> repeats one
run-soak: build
	ulimit -n 4096; SEED=$(SEED) MINUTES=$(MINUTES) WORKERS=$(WORKERS) CNIBOX_BIN=$(abspath $(BINARY)) $(CARGO) test $(WORKSPACE) \
		--test it -- --exact --nocapture soak::everything_at_once_leaves_nothing

lint: check-source ## formatting, clippy, rustdoc, texts of source and documentation, licences and sources of dependencies, shell scripts, charts, manifests
	$(CARGO) clippy --locked --lib --bins -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(WORKSPACE) --no-deps --document-private-items --quiet
	$(CARGO) test $(WORKSPACE) --quiet --test workflows --test prepare --test lanes
	scripts/prepare.sh lint
	$(CARGO) deny --log-level error check bans licenses sources
	shellcheck scripts/*.sh tests/*.sh tests/runtimes/*.sh packaging/*.sh .ci/run
	PYTHONDONTWRITEBYTECODE=1 packaging/charts.py --check
	@python3 scripts/manifests.py || test $$? = 77

lists: ## write the lists of applets in README.md and docs/SUMMARY.md from the table in src/applets.rs
	CNIBOX_WRITE_LISTS=1 $(CARGO) test $(WORKSPACE) --quiet --test docs -- the_lists_of_applets || true
	$(CARGO) test $(WORKSPACE) --quiet --test docs -- the_lists_of_applets

arch: ## check the imports against the layers of docs/architecture.md
	$(CARGO) test $(WORKSPACE) --test arch

# A container has no init that reaps orphans, as a node has; DEL leaves one where it does.
INIT = $(shell [ "$$(id -u)" = 0 ] && command -v catatonit >/dev/null && echo unshare --pid --fork --kill-child --mount-proc catatonit --)

bench: build ## the same pods with two plugin directories alternately; results also as JSON and charts in target/; PEER=<directory>, NETAVARK=<program>, ARGS="bridge --pods 1000"
	scripts/prepare.sh bench
	PEER=$(PEER) CNIBOX_BIN=$(abspath $(BINARY)) $(INIT) $(CARGO) bench --locked -p cnibox-tests --bench pods -- --json $(abspath $(OUT))/bench.json $(ARGS)
	@[ ! -e $(OUT)/bench.json ] || PYTHONDONTWRITEBYTECODE=1 packaging/charts.py $(OUT)/bench.json $(OUT)

size: build ## check that the executable is within its size limit, static and position independent
	@scripts/static-pie.sh $(BINARY)
	@size=$$(stat -c %s $(BINARY)); echo "$$size bytes of $(SIZE_LIMIT)"; test $$size -le $(SIZE_LIMIT)

test-runtimes: build ## containerd, podman and, if installed, CRI-O with these plugins; ARGS=PEER: with the reference plugins
	scripts/prepare.sh runtimes
	tests/runtimes/run.sh $(if $(filter PEER,$(ARGS)),$(PEER),$(BINARY))

matrix: build ## test-runtimes with every installed runtime and those in the directories of RUNTIMES; updates the table of docs/compatibility.md
	scripts/prepare.sh runtimes
	tests/runtimes/matrix.py $(BINARY) docs/compatibility.md

test-kernels: prepare-test build sanity ## cni-sanity, the integration tests of each plugin and the unit tests on the kernels of Debian 11, 12, 13 and sid, in VMs: an hour with KVM; SUITES="trixie sid" TYPES="bridge ptp" SELECT="lifecycle"
	$(CARGO) test $(WORKSPACE) --no-run --lib --test it
	PAGE=$(if $(TYPES)$(SELECT),,$(CURDIR)/docs/compatibility.md) scripts/kernels.sh $(abspath $(BINARY)) $(dir $(abspath $(BINARY)))cni-sanity \
		$$($(CARGO) test $(WORKSPACE) --no-run --lib --test it 2>&1 | sed -n 's/^  Executable .*(\(.*\))/\1/p' | xargs realpath)

test-userlands: prepare-test prepare-fresh build sanity ## the tests of packet filters with the programs of Debian 11, 12, 13 and sid, on this kernel, and the packages of "make dist", if there are any: an hour; SUITES="trixie sid" PATTERNS="firewall::"
	RUSTFLAGS='-C target-feature=+crt-static' $(CARGO_TARGET)_RUNNER="scripts/userlands.sh $(abspath $(BINARY)) $(dir $(abspath $(BINARY)))cni-sanity" \
		PAGE=$(if $(PATTERNS),,$(CURDIR)/docs/compatibility.md) DIST=$(if $(wildcard $(DIST)/*.deb),$(abspath $(DIST))) $(CARGO) test --locked --quiet --target $(TARGET) -p cnibox-tests --test it

test-arch: prepare-emulate prepare-$(TARGET) build sanity ## cni-sanity and the unit tests, built for ARCH (arm64, armhf, ppc64el, riscv64, s390x), in Debian's kernel under emulation, and state files exchanged with it; ARGS="--type bridge"
	$(MAKE) build TARGET=$(HOST)
	RUSTFLAGS='-C target-feature=+crt-static' $(CARGO_TARGET)_RUNNER="scripts/arch.sh $(ARCH) $(BINARY) $(dir $(BINARY))cni-sanity $(OUT)/$(HOST)/release/cnibox" \
		ARGS='$(ARGS)' $(CARGO) test --locked --quiet --lib --target $(TARGET)

cross: ## for each other architecture, or TARGET: type-check, build, run if qemu-user is installed, exchange state with this one
	for target in $(if $(filter $(HOST),$(TARGET)),$(filter-out $(HOST),$(ALL)),$(TARGET)); do HOST=$(HOST) scripts/cross.sh $$target || exit; done

# image_of NAME FILE: an OCI archive of the targets' executables.
image_of = PYTHONDONTWRITEBYTECODE=1 python3 packaging/image.py $(1) $(DIST)/$(2) $(VERSION) \
	$(foreach target,$(TARGETS),$(call go_of,$(target))=$(OUT)/$(target)/release/$(1))
image: ## an OCI archive of an image with only the executable, in target/dist; of several architectures with TARGETS, such as TARGETS=all
	for target in $(TARGETS); do $(MAKE) build TARGET=$$target || exit; done
	@mkdir -p $(DIST)
	$(call image_of,cnibox,cnibox.oci.tar)

# Its list, manual pages and completions come from an executable that this machine can execute.
dist: ## all files of a release: tgz, deb, rpm, image, SBOM, checksums, in target/dist; of several architectures with TARGETS: "make dist TARGETS=all"
	scripts/prepare.sh dist
	for target in $(filter-out $(HOST),$(TARGETS)); do scripts/prepare.sh $$target || exit; done
	rm -rf $(DIST)
	mkdir -p $(DIST)
	for target in $(HOST) $(filter-out $(HOST),$(TARGETS)); do $(MAKE) build sanity BUILD='auditable build' TARGET=$$target || exit; done
	$(if $(word 2,$(TARGETS)),$(call image_of,cnibox,cnibox-$(VERSION).oci.tar))
	for target in $(TARGETS); do \
		packaging/dist.sh $(OUT)/$$target/release/cnibox $$target $(DIST) $(OUT)/$(HOST)/release/cnibox || exit; done
	$(if $(filter $(HOST),$(TARGETS)),tests/dist.sh $(DIST),@echo "dist: these files are for another architecture: tests/dist.sh verifies them there")

reproduce: dist ## build the release again from a clone in another directory, and compare all checksums
	scripts/reproduce.sh $(DIST)

book: ## the documentation as a book, target/book/index.html
	scripts/prepare.sh book
	PYTHONDONTWRITEBYTECODE=1 packaging/book.py $(OUT)/book-src $(OUT)/book

record: ## record the demo as an animated SVG, docs/images/demo.svg
run-record: build
	PYTHONDONTWRITEBYTECODE=1 $(INIT) packaging/record.py docs/images/demo.svg scripts/demo.sh $(BINARY)

package: ## package the crates cnibox, cnibox-cni and cni-sanity and build them from the archives; ARGS=--allow-dirty
	$(CARGO) package --locked -p cnibox -p cnibox-cni -p cni-sanity $(ARGS)

fuzz: ## fuzz each target for 60 seconds, with a nightly compiler; ARGS="600 dhcp4": seconds, targets
	scripts/prepare.sh fuzz
	scripts/fuzz.sh $(ARGS)

install: build ## install the executable and a link per applet in DESTDIR/BINDIR (default /opt/cni/bin); ARGS="--mode copy"
	DESTDIR='$(DESTDIR)' $(BINARY) install $(BINDIR) $(ARGS)

clean: ## delete all build output
	$(CARGO) clean
