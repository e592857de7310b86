"""The package: its errors, its extra, and the generated code."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf import descriptor_pb2

import feedapi_client.liftbridge as package
from feedapi_client.errors import FeedError, FencedError
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    messages_pb2,
)
from feedapi_client.liftbridge.liftbridge_errors import LiftbridgeError

ROOT = Path(__file__).parents[2]
PROTO = "feedapi_client/liftbridge/messages.proto"


def test_every_error_is_a_liftbridge_error_and_relay_fencing_is_a_fenced_error() -> None:
    public = [getattr(package, name) for name in package.__all__]
    errors = [each for each in public if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) == 15
    assert all(
        issubclass(error, LiftbridgeError) and issubclass(error, FeedError) for error in errors
    )
    assert issubclass(package.RelayFencedError, FencedError)


@pytest.mark.parametrize("missing", ["nats", "google_crc32c", "gufo.liftbridge"])
def test_without_the_extra_the_import_says_how_to_get_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\nimport feedapi_client.liftbridge"
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert "pip install 'feedapi-client[liftbridge]'" in result.stderr.splitlines()[-1]


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    out = tmp_path / "set"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I",
            ".",
            f"--descriptor_set_out={out}",
            PROTO,
        ],
        check=True,
        cwd=ROOT,
    )
    [compiled] = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    generated = descriptor_pb2.FileDescriptorProto()
    messages_pb2.DESCRIPTOR.CopyToProto(generated)
    for file in (compiled, generated):
        for message in file.message_type:
            for field in [
                *message.field,
                *(field for nested in message.nested_type for field in nested.field),
            ]:
                field.ClearField("json_name")  # only the compiler fills it in
    assert compiled == generated


def test_the_generated_code_requires_no_version_of_the_runtime() -> None:
    # Generators since 5.27 write a check that refuses other versions of the runtime, or warns.
    assert "runtime_version" not in (ROOT / PROTO).with_name("messages_pb2.py").read_text()


@pytest.mark.parametrize("client", [LiftbridgePublisher, LiftbridgeApi])
def test_on_trio_the_error_says_that_asyncio_is_needed(client: Any) -> None:
    async def enter() -> None:
        with pytest.raises(LiftbridgeError, match="asyncio"):
            await client("127.0.0.1:1").__aenter__()

    with ThreadPoolExecutor(1) as pool:  # the thread of the tests has a loop of asyncio
        pool.submit(partial(anyio.run, enter, backend="trio")).result()


@pytest.mark.slow
def test_it_can_be_imported_beside_another_copy_of_the_brokers_api() -> None:
    ours = "import feedapi_client.liftbridge.messages_pb2 as ours; "
    program = f"import gufo.liftbridge.api_pb2; {ours}ours.Message(offset=-1)"
    for order in (program, ours + program):
        subprocess.run([sys.executable, "-W", "error", "-c", order], check=True, cwd=ROOT)
