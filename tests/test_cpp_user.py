"""What a C++ project sees: the installed headers and library, found by CMake, without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import markdown
import pytest
import torch
from expecttest import assert_expected_inline
from helpers import ROOT, run_python
from network_group import free_port

import dtorch_ops

EXAMPLE = ROOT / "examples" / "cpp"
CORE_TESTS = ROOT / "tests" / "cpp"
LIBRARY = Path(dtorch_ops.__file__).parent / "lib" / "libdtorch_ops.so"

# Headers of torch are read for a minute or so.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def tool(name: str) -> str:
    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert found, f"{name} was not found"
    return found


def run(*command: str, seconds: float = 60, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, **kwargs
    )


def checked(*command: str, seconds: float = 60) -> str:
    done = run(*command, seconds=seconds)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def configure(source: Path, build: Path, prefixes: list[str]) -> subprocess.CompletedProcess[str]:
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "CMAKE_PREFIX_PATH": ";".join(prefixes),
    }
    if ccache := shutil.which("ccache"):
        options["CMAKE_CXX_COMPILER_LAUNCHER"] = ccache
    given = [f"-D{name}={value}" for name, value in options.items()]
    return run(tool("cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", *given)


PREFIXES = [torch.utils.cmake_prefix_path, dtorch_ops.cmake_prefix_path]


def build(source: Path, folder: Path) -> Path:
    configured = configure(source, folder, PREFIXES)
    assert configured.returncode == 0, configured.stdout + configured.stderr
    checked(tool("cmake"), "--build", str(folder), seconds=540)
    return folder


README = markdown.blocks_of(EXAMPLE / "README.md")


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the commands of the README were given, and what they printed."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    [commands] = [block.code for block in README if block.language == "sh"]
    here = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([here, os.environ["PATH"]]),
        "CMAKE_CXX_COMPILER_LAUNCHER": shutil.which("ccache") or "",
    }
    done = run("bash", "-ec", commands, seconds=590, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def examples(readme: tuple[Path, str]) -> Path:
    return readme[0] / "build"


@pytest.fixture(scope="module")
def example(examples: Path) -> Path:
    return examples / "scripted_model"


@pytest.fixture(scope="module")
def worker(examples: Path) -> Path:
    return examples / "worker"


@pytest.fixture(scope="module")
def core_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CORE_TESTS, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    checked(sys.executable, "-W", "error", str(EXAMPLE / "export_model.py"), str(path))
    return path


def loaded_libraries(program: Path) -> str:
    return checked(tool("ldd"), str(program))


# ---- Two machines -------------------------------------------------------------------------------


def test_owner_and_worker_without_python_are_two_of_rpc(core_tests):
    program, port = str(core_tests / "network_main"), str(free_port())
    with subprocess.Popen([program, "owner", port], stdout=subprocess.PIPE, text=True) as owner:
        try:
            worker = run(program, "worker", port)
            assert worker.returncode == 0, worker.stderr
            said = owner.communicate(timeout=60)[0].splitlines()
            assert owner.returncode == 0
        finally:
            owner.kill()
    assert said[:2] == ["value: 6", "error: RuntimeError: of the worker"]
    assert said[2].startswith("drop: broken: the last process that could")
    assert said[3].startswith("die: broken: the connection to worker 'worker' is lost")


OWNER = """
import subprocess, sys
sys.path.append("tests")
import network_group
network_group.join("owner", 0, 1, network_group.free_port())
dtorch_ops.network.set_lost_after(1.0)
promises = [dtorch_ops.TensorPromise("network") for _ in range(1000)]
futures = [promise.get_future() for promise in promises]
tokens, _, address = zip(*[promise.token().partition("@") for promise in promises])
tokens = [token.partition("=")[0] for token in tokens]
# No small mistake makes the last one's number of another's.
given = "\\n".join([address[0], tokens[-1], *tokens[:64]])
said = subprocess.run(
    [*sys.argv[1:]], input=given, stdout=subprocess.PIPE, text=True, timeout=60, check=True
)
print(said.stdout, end="")
assert futures[-1].wait(30_000).tolist() == [4.0] * 3
"""


def test_an_owner_answers_what_makes_no_sense_and_lives(core_tests):
    program = str(core_tests / "network_stranger")
    said = run_python(OWNER, args=(program, "20000", "1"))  # RPC warns of what it is told
    assert said.returncode == 0, said.stdout + said.stderr
    answered = dict(line.split() for line in said.stdout.splitlines())
    assert sorted(answered) == ["d", "e", "r", "s"]
    assert sum(map(int, answered.values())) == 20000


# ---- The example --------------------------------------------------------------------------------


def test_the_example_prints_what_it_should(example, model):
    assert_expected_inline(
        checked(str(example), str(model)),
        """\
model: hidden 7.5 0, result 150
model: hidden 7.5 0, result 150
model: hidden 7.5 0, result 150
fetch: shared 6, snapshot 3, at once 6
fetch: valid 0
fetch: expected a future whose result has not been taken, got one that get() has consumed: keep the result, or use wait(), which does not consume
promise: the future did not complete within the time limit; it can be waited for again
promise: ready 0, valid 1
promise: value 8
promise: the promise has been fulfilled before: it takes one value or one error
error: the producer has no value
error: the promise was dropped by its last holder without a value: set_value or set_exception must be called before that
sync: all done 0, then 1
sync: sync: expected a device that this build of torch knows (cpu, meta), got privateuseone
""",  # noqa: E501
    )


def test_the_example_says_the_same_as_python(model):
    """The model gives in C++ what it gives here."""
    promise = dtorch_ops.TensorPromise()
    with pytest.warns(Warning, match="torch.jit"):
        loaded = torch.jit.load(str(model))
    hidden = loaded(torch.tensor([[1.0, 2.0, 3.0]]), promise)
    assert hidden.tolist() == [[7.5, 0]]
    assert promise.get_future().get().tolist() == [[150]]


@pytest.fixture(scope="module")
def package(readme: tuple[Path, str]) -> Path:
    return readme[0] / "model.pt2"


def test_a_package_of_aotinductor_runs_without_python(examples, package):
    """Hidden layers as they were at the start: the next layer has doubled them in place."""
    assert_expected_inline(
        checked(str(examples / "packaged_model"), str(package)),
        """\
rows 1: hidden 7.5, result 150
rows 2: hidden 24, result 480
rows 3: hidden 49.5, result 990
""",
    )


def test_a_package_of_aotinductor_says_the_same_in_python(package):
    model = torch._inductor.aoti_load_package(str(package))
    hidden, result = model(torch.arange(1.0, 7.0).view(2, 3))
    assert hidden.tolist() == [[7.5, 0], [16.5, 0]] and result.tolist() == [[150], [330]]


@pytest.mark.parametrize("program", ["scripted_model", "packaged_model", "worker"])
def test_the_examples_need_no_python(examples, program):
    libraries = loaded_libraries(examples / program)
    assert "libpython" not in libraries and "torch_python" not in libraries
    assert str(LIBRARY) in libraries
    assert "not found" not in libraries


@pytest.mark.parametrize(
    "arguments, message", [([], "usage"), (["missing.pt"], "missing.pt"), (["a", "b"], "usage")]
)
def test_the_example_says_what_it_wants(example, arguments, message):
    done = run(str(example), *arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert message in done.stderr


def test_the_example_exits_cleanly_many_times(example, model):
    """The library's threads and static objects outlive neither the program nor each other."""
    for _ in range(10):
        done = run(str(example), str(model))
        assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_of_the_example_names_its_files():
    text = (EXAMPLE / "README.md").read_text()
    for file in EXAMPLE.iterdir():
        if file.name not in ("README.md", "CMakeLists.txt"):
            assert file.name in text


# ---- The worker ---------------------------------------------------------------------------------

LIMIT_MS = 60_000


class CppWorker:
    """The process, and the futures of what it has promised. Use it in a ``with``."""

    def __init__(self, program: Path, model: Path | str) -> None:
        ready, result = dtorch_ops.VoidPromise(), dtorch_ops.TensorPromise()
        self.ready, self.result = ready.get_future(), result.get_future()
        self.process = subprocess.Popen(
            [str(program), str(model), ready.token(), result.token()],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, numbers: str = "") -> tuple[int, str]:
        """Its exit code and its stderr, once it has read ``numbers``."""
        _, said = self.process.communicate(numbers, timeout=60)
        return self.process.returncode, said

    def __enter__(self) -> CppWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_the_worker_fulfils_the_promises_of_this_process(worker, model):
    with CppWorker(worker, model) as process:
        assert process.ready.wait(LIMIT_MS) is None
        assert not process.result.is_ready()
        assert process.finish("1 2 3") == (0, "")
    result = process.result.get()  # which has outlived its producer
    assert result.tolist() == [[150]]
    assert result.add_(1).tolist() == [[151]]


def test_the_commands_of_the_readme_run_the_examples(readme):
    assert "model: hidden 7.5 0, result 150\n" in readme[1]
    assert "rows 3: hidden 49.5, result 990\n" in readme[1]


def test_the_code_of_the_readme_runs(readme):
    [program] = [block for block in README if block.language == "python"]
    done = run(sys.executable, "-W", "error", "-c", program.code, cwd=readme[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, program.says, "")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("1 2", "mat1 and mat2 shapes cannot be multiplied"),
        ("1 two 3", "expected numbers on the standard input"),
    ],
)
def test_an_error_of_the_worker_is_that_of_the_future(worker, model, numbers, message):
    with CppWorker(worker, model) as process:
        code, said = process.finish(numbers)
    assert code == 1 and message in said
    assert process.ready.wait(LIMIT_MS) is None
    with pytest.raises(RuntimeError, match=message) as raised:
        process.result.wait(LIMIT_MS)
    assert not isinstance(raised.value, dtorch_ops.BrokenPromiseError)


def test_a_model_that_cannot_be_loaded_fails_both_promises(worker):
    with CppWorker(worker, "missing.pt") as process:
        code, said = process.finish("1 2 3")
    assert code == 1 and "missing.pt" in said
    for future in (process.ready, process.result):
        with pytest.raises(RuntimeError, match=r"missing\.pt"):
            future.wait(LIMIT_MS)


def test_a_worker_that_ends_without_a_value_breaks_its_promise(worker, model):
    with CppWorker(worker, model) as process:
        assert process.ready.wait(LIMIT_MS) is None
        assert process.finish(numbers="") == (3, "")
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        process.result.wait(LIMIT_MS)


def test_a_worker_that_is_killed_breaks_its_promise(worker, model):
    with CppWorker(worker, model) as process:
        assert process.ready.wait(LIMIT_MS) is None  # it has both promises now
        process.process.kill()
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            process.result.wait(LIMIT_MS)
    assert process.ready.get() is None  # what was set stays


def test_a_worker_says_what_it_wants(worker, model):
    done = run(str(worker), str(model))
    assert done.returncode == 2 and done.stderr.startswith("usage: worker MODEL.pt READY RESULT")
    void, tensor = dtorch_ops.VoidPromise().token(), dtorch_ops.TensorPromise().token()
    for tokens in ((tensor, void), ("hello", tensor), (void, "hello")):
        done = run(str(worker), str(model), *tokens)
        assert done.returncode == 1 and done.stdout == ""
        assert "token" in done.stderr


# ---- CMake --------------------------------------------------------------------------------------


@pytest.fixture
def other_torch(tmp_path: Path) -> list[str]:
    """The package as if built for another torch."""
    shutil.copytree(dtorch_ops.cmake_prefix_path, tmp_path / "cmake")
    config = tmp_path / "cmake" / "dtorch_ops" / "dtorch_opsConfig.cmake"
    minor = ".".join(torch.__version__.split(".")[:2])
    text = config.read_text()
    assert minor in text
    config.write_text(text.replace(minor, "1.99"))
    return [torch.utils.cmake_prefix_path, str(tmp_path / "cmake")]


def test_cmake_refuses_another_torch(tmp_path, other_torch):
    done = configure(EXAMPLE, tmp_path / "build", other_torch)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "built for torch 1.99" in said and torch.__version__.split("+")[0] in said


def test_cmake_says_what_to_add_when_torch_is_not_found(tmp_path):
    done = configure(EXAMPLE, tmp_path / "build", [dtorch_ops.cmake_prefix_path])
    assert done.returncode != 0
    assert "torch" in done.stderr and "CMAKE_PREFIX_PATH" in done.stderr


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch's own CMake files ask for a CUDA toolkit"
)
def test_a_project_that_asks_for_torch_itself(tmp_path):
    """Before or after: both orders configure."""
    for i, order in enumerate((("Torch", "dtorch_ops"), ("dtorch_ops", "Torch"))):
        source = tmp_path / f"source{i}"
        source.mkdir()
        finds = "\n".join(f"find_package({name} REQUIRED)" for name in order)
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES C CXX)\n"
            f"{finds}\nget_target_property(kind dtorch_ops::dtorch_ops TYPE)\n"
            'message(STATUS "kind ${kind}")\n'
        )
        done = configure(source, tmp_path / f"build{i}", PREFIXES)
        assert done.returncode == 0, done.stderr
        assert "kind SHARED_LIBRARY" in done.stdout


# ---- The C++ core -------------------------------------------------------------------------------

CORE_TEST_NAMES = re.findall(
    r"^\s+TEST\((\w+)\),$", (CORE_TESTS / "core_test.cpp").read_text(), re.M
)


@pytest.mark.parametrize("name", CORE_TEST_NAMES)
def test_core(core_tests, name):
    """Each in a process of its own: one that aborts or hangs says which it is."""
    assert checked(str(core_tests / "core_test"), name) == "1 passed\n"


def test_no_core_test_is_left_out(core_tests):
    assert checked(str(core_tests / "core_test"), "--list").split() == CORE_TEST_NAMES
    assert run(str(core_tests / "core_test"), "NoSuchTest").returncode != 0


def test_the_library_opens_in_a_program_that_does_not_link_it(core_tests):
    program = core_tests / "open_library"
    libraries = loaded_libraries(program)
    assert "dtorch_ops" not in libraries and "libpython" not in libraries
    schemas = [
        str(schema)
        for name in ("get_tensor_async", "sync")
        for schema in torch._C._jit_get_schemas_for_operator(f"dtorch::{name}")
        if not schema.overload_name
    ]
    assert checked(str(program), str(LIBRARY)).splitlines() == [*schemas, "2"]
