# The only front door: recipes wrap cargo and the scripts below tests/, and hold no logic.

CARGO   ?= cargo
HOST    := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
TARGET  ?= $(HOST)
TARGETS ?= $(TARGET)
PREFIX  ?= /opt/cni
BINDIR  ?= $(PREFIX)/bin
DESTDIR ?=
PEER    ?= /usr/lib/cni
ARGS    ?=
SOAK    ?= 3
PLUGIN  ?= ptp

# Static and position independent: docs/decisions/0014-before-main.md has what that costs.
STATIC  := -C target-feature=+crt-static
# SHA-512 of a few bytes is not worth asking the processor what it can do: under a hypervisor that
# question costs more than the sum.
STATIC  += --cfg sha2_backend="soft" --cfg sha2_backend_soft="compact"
# Relative relocations in the packed form DT_RELR: 120 kB less. glibc applies it to a static executable since 2.36.
ifeq ($(shell printf '%s\n' 2.36 "$$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)" | sort -CV && echo yes),yes)
STATIC  += -C link-arg=-Wl,-z,pack-relative-relocs
endif
# Frames by a register: the unwind tables have a quarter less to say, 190 kB; perf and bpf see whole stacks.
STATIC  += -C force-frame-pointers=yes
# The same bytes wherever the source and the registry are.
STATIC  += --remap-path-prefix=$(CURDIR)=cnibox
STATIC  += --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo

# Everything that is built, and what is released.
OUT     := $(or $(CARGO_TARGET_DIR),target)
BINARY  := $(OUT)/$(TARGET)/release/cnibox
DIST    ?= $(OUT)/dist
# `cargo auditable` writes the list of dependencies into the executable.
BUILD   ?= build
# The time in everything that is released: that of the last commit.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH
# Debian's cross linker; that of the machine itself is cargo's affair.
ifneq ($(TARGET),$(HOST))
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER ?= aarch64-linux-gnu-gcc
endif

# Stripped size in bytes that no release may pass: 5 MB.
SIZE_LIMIT := 5000000

.PHONY: help build sanity check demo test test-vm soak test-runtimes matrix test-arm64 lint arch bench size cross image dist reproduce book record package fuzz install clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

# What a recipe needs is there before the first compile; DEPS=no installs nothing.
.NOTPARALLEL:
prepare-%:
	@tests/prepare.sh $*
build sanity lint arch: prepare-build

# Copied at once, as the installer does: the page cache of newer kernels keeps what is written in
# large pieces in large folios, which take a third fewer page faults than those of the linker.
build: ## the static release binary, target/<target>/release/cnibox
	@[ -e $(BINARY) ] || echo "build: the first compile takes two minutes on two cores"
	RUSTFLAGS='$(STATIC)' $(CARGO) $(BUILD) --release --locked --bin cnibox --target $(TARGET)
	@install -m 755 /dev/null $(BINARY).new && dd if=$(BINARY) of=$(BINARY).new bs=64M status=none
	@mv $(BINARY).new $(BINARY)

sanity: ## the conformance suite for plugins, target/<target>/release/cni-sanity
	RUSTFLAGS='$(STATIC)' $(CARGO) $(BUILD) --release --locked --bin cni-sanity --target $(TARGET)

demo: prepare-demo build ## two containers on one bridge in a private host: attach, look, ping, detach
	@tests/demo.sh $(BINARY)

check: lint arch ## what to run before a commit: lint, unit tests, the integration tests of one plugin; PLUGIN=bridge
	$(CARGO) test --locked --quiet --lib --test docs
	$(CARGO) test --locked --quiet --test it -- $(PLUGIN)::

test: prepare-test build ## the whole suite: on this kernel, in a VM what this kernel lacks; the demo first
	tests/demo.sh $(BINARY)
	@echo "test: compiles the tests, five minutes, and runs them, twenty on two cores"
	CNIBOX_BIN=$(abspath $(BINARY)) tests/lanes.sh host-and-vm

test-vm: prepare-test build ## the tests for which this kernel lacks something, in a VM; ARGS=<pattern of names>
	CNIBOX_BIN=$(abspath $(BINARY)) tests/lanes.sh vm $(ARGS)

soak: prepare-test build ## the whole suite with the tests that take long, SOAK rounds of the random ones, a minute of each fuzz target
	CNIBOX_SOAK=$(SOAK) CNIBOX_VM_TIMEOUT=7200 CNIBOX_BIN=$(abspath $(BINARY)) tests/lanes.sh host-and-vm
	tests/fuzz.sh 60

lint: ## formatting, clippy, documentation, licences and sources of dependencies, shell scripts, charts, manifests
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CARGO) clippy --locked --no-default-features --bins -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --document-private-items --quiet
	tests/prepare.sh lint
	$(CARGO) deny --log-level error check bans licenses sources
	shellcheck tests/*.sh tests/runtimes/*.sh packaging/*.sh .ci/run
	PYTHONDONTWRITEBYTECODE=1 packaging/charts.py --check
	@python3 tests/manifests.py || test $$? = 77

arch: ## the layers of docs/architecture.md, checked in the source
	$(CARGO) test --locked --test arch

bench: build ## the same pods with two plugin folders in turn, also as JSON and charts in target/; PEER=<folder>, NETAVARK=<program>, ARGS="bridge --pods 1000"
	tests/prepare.sh bench
	PEER=$(PEER) CNIBOX_BIN=$(abspath $(BINARY)) $(CARGO) bench --locked --bench pods -- --json $(abspath $(OUT))/bench.json $(ARGS)
	@[ ! -e $(OUT)/bench.json ] || PYTHONDONTWRITEBYTECODE=1 packaging/charts.py $(OUT)/bench.json $(OUT)

size: build ## size of the binary against its limit; that it is static and position independent
	@tests/static-pie.sh $(BINARY)
	@size=$$(stat -c %s $(BINARY)); echo "$$size bytes of $(SIZE_LIMIT)"; test $$size -le $(SIZE_LIMIT)

test-runtimes: build ## containerd and podman start pods and containers with these plugins; ARGS=PEER for the reference's
	tests/prepare.sh runtimes
	tests/runtimes/run.sh $(if $(filter PEER,$(ARGS)),$(PEER),$(BINARY))

matrix: build ## the same with every runtime here, and in folders of RUNTIMES, into the table of docs/compatibility.md
	tests/prepare.sh runtimes
	tests/runtimes/matrix.py $(BINARY) docs/compatibility.md

test-arm64: prepare-arm64 cross ## cni-sanity on arm64: both are built for it, and run in Debian's kernel under emulation; ARGS="--type bridge"
	$(MAKE) sanity TARGET=aarch64-unknown-linux-gnu
	ARGS='$(ARGS)' tests/arm64.sh $(OUT)/aarch64-unknown-linux-gnu/release/cnibox $(OUT)/aarch64-unknown-linux-gnu/release/cni-sanity

cross: ## the other architecture: check, and build where its linker is; TARGET=aarch64-unknown-linux-gnu
	tests/cross.sh aarch64-unknown-linux-gnu

# Go's name of a target's architecture, and the binary.
image_of = $(subst x86_64,amd64,$(subst aarch64,arm64,$(firstword $(subst -, ,$(1)))))=$(OUT)/$(1)/release/cnibox
image: ## an OCI image with nothing but the binary, as an archive in target/dist; an index with TARGETS="x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu"
	for target in $(TARGETS); do $(MAKE) build TARGET=$$target || exit; done
	@mkdir -p $(DIST)
	PYTHONDONTWRITEBYTECODE=1 python3 packaging/image.py cnibox $(DIST)/cnibox.oci.tar \
		$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1) $(foreach target,$(TARGETS),$(call image_of,$(target)))

dist: ## everything that is released: tgz, deb, rpm, image, SBOM, checksums, into target/dist
	tests/prepare.sh dist
	$(MAKE) build sanity BUILD='auditable build'
	rm -rf $(DIST)
	mkdir -p $(DIST)
	packaging/dist.sh $(BINARY) $(TARGET) $(DIST)
	tests/dist.sh $(DIST)

reproduce: dist ## makes it all again from a clone elsewhere, and compares every byte
	tests/reproduce.sh $(DIST)

book: ## the documentation as a book, target/book/index.html
	tests/prepare.sh book
	PYTHONDONTWRITEBYTECODE=1 packaging/book.py $(OUT)/book-src $(OUT)/book

record: prepare-demo build ## docs/images/demo.svg: the demo as an animated picture
	PYTHONDONTWRITEBYTECODE=1 packaging/record.py docs/images/demo.svg tests/demo.sh $(BINARY)

package: ## the crate as it would be published, built from its archive; ARGS=--allow-dirty
	$(CARGO) package --locked $(ARGS)

fuzz: ## so many seconds of each fuzz target, with a nightly compiler; ARGS="600 dhcp4"
	tests/prepare.sh fuzz
	tests/fuzz.sh $(ARGS)

install: build ## the binary and a link per applet into DESTDIR/BINDIR (default /opt/cni/bin); ARGS="--mode copy"
	DESTDIR='$(DESTDIR)' $(BINARY) install $(BINDIR) $(ARGS)

clean: ## everything that was built
	$(CARGO) clean
