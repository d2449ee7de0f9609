#!/bin/sh
# files.sh NAME...: writes what the servers of these names have into directories of these names below the current
# directory, and a certificate for all of them: tls.crt, tls.key.
set -eu

export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1

subjects=
for name in "$@"; do
    mkdir -p "$name"
    echo "this is $name" >"$name/index.html"
    subjects=$subjects,DNS:$name
done
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test \
    -addext "subjectAltName=${subjects#,}" -keyout tls.key -out tls.crt 2>/dev/null

# A repository, for the protocol that needs only files.
git init --quiet source
echo "the source" >source/README
git -C source add README
git -C source -c user.name=test -c user.email=test@example.org commit --quiet --message=first
mkdir -p github.com/example
git clone --quiet --bare source github.com/example/project.git
git -C github.com/example/project.git update-server-info

# A package of JavaScript.
mkdir -p package registry.npmjs.org/-
echo '{"name": "example", "version": "1.0.0"}' >package/package.json
tar -czf registry.npmjs.org/-/example-1.0.0.tgz package
cat >registry.npmjs.org/example <<END
{"name": "example", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {"name": "example", "version": "1.0.0",
  "dist": {"tarball": "https://registry.npmjs.org/-/example-1.0.0.tgz"}}}}
END

# A package of Python.
wheel=example-1.0.0-py3-none-any.whl
mkdir -p example-1.0.0.dist-info pypi.org/simple/example files.pythonhosted.org
echo "" >example.py
printf 'Metadata-Version: 2.1\nName: example\nVersion: 1.0.0\n' >example-1.0.0.dist-info/METADATA
printf 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n' >example-1.0.0.dist-info/WHEEL
printf 'example.py,,\nexample-1.0.0.dist-info/RECORD,,\n' >example-1.0.0.dist-info/RECORD
python3 -m zipfile -c "files.pythonhosted.org/$wheel" example.py example-1.0.0.dist-info
echo "<a href=\"https://files.pythonhosted.org/$wheel\">$wheel</a>" >pypi.org/simple/example/index.html
