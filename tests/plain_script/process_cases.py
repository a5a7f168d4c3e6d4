"""A plain script: processes, input and output. Run by plain Python and by Rankless, with lines to read."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch  # noqa: F401
from tqdm import tqdm


def typed_input():
    return input("name? ")


def read_lines():
    return sys.stdin.readline(), sys.stdin.readline(), sys.stdin.read()


def end_of_input():
    try:
        return input()
    except EOFError as error:
        return repr(error)


def run_and_capture():
    done = subprocess.run(
        ["sh", "-c", "echo out; echo err >&2; echo x >> run.txt; exit 3"], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr, done.args, Path("run.txt").read_text()


def run_checked():
    found = []
    for call in (
        lambda: subprocess.run(["sh", "-c", "echo o; exit 2"], check=True, capture_output=True),
        lambda: subprocess.check_output("exit 4", shell=True),
        lambda: subprocess.run(["no-such-command"]),
        lambda: subprocess.run(["sleep", "9"], timeout=0.2),
        lambda: subprocess.check_call(["false"]),
    ):
        try:
            found.append(call())
        except (subprocess.SubprocessError, OSError) as error:
            text = str(error).partition(" timed out after ")[0]
            found.append((type(error).__name__, text, getattr(error, "stdout", None)))
    return found


def simple_calls():
    return (
        subprocess.call(["sh", "-c", "echo a >> call.txt"]),
        subprocess.check_output(["echo", "hé"]),
        subprocess.check_output("echo text", shell=True, text=True),
        subprocess.getoutput("echo got"),
        subprocess.getstatusoutput("exit 7"),
        os.system("echo b >> call.txt; exit 1"),
        Path("call.txt").read_text(),
    )


def piped_input():
    done = subprocess.run(["cat"], input=b"given", stdout=subprocess.PIPE)
    return done.stdout


def process_object():
    process = subprocess.Popen(
        ["sh", "-c", "cat; echo done >> p.txt"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    out, err = process.communicate("to the process")
    return out, err, process.returncode, process.poll(), Path("p.txt").read_text()


def streamed_process():
    with subprocess.Popen(["sh", "-c", "for i in 1 2 3; do echo $i; done"], stdout=subprocess.PIPE) as process:
        lines = [line.decode() for line in process.stdout]
    return lines, process.returncode


def talked_process():
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    answers = []
    for word in ("one", "two"):
        process.stdin.write(word + "\n")
        process.stdin.flush()
        answers.append(process.stdout.readline())
    process.stdin.close()
    return answers, process.wait()


def ended_process():
    process = subprocess.Popen(["sleep", "30"])
    running = process.poll()
    process.terminate()
    code = process.wait(timeout=20)
    late = subprocess.Popen(["sleep", "30"])
    try:
        late.wait(timeout=0.05)
    except subprocess.TimeoutExpired as error:
        found = error.cmd, error.timeout
    late.kill()
    return running, code, found, late.wait()


def shell_pipe():
    with os.popen("echo popen; echo c >> popen.txt") as pipe:
        return pipe.read(), Path("popen.txt").read_text()


def script_reads_what_it_wrote():
    Path("code.py").write_text("print(open('data.txt').read())")
    Path("data.txt").write_text("from the script")
    return subprocess.check_output([sys.executable, "code.py"], text=True)


def progress_bar():
    return [number for number in tqdm(range(3), desc="bar")]


def own_process():
    os.kill(os.getpid(), 0)
    return os.getpid() == os.getpid(), subprocess.check_output(["sh", "-c", "echo $PPID"], text=True).strip() == str(
        os.getpid()
    )


def measured_time():
    start, monotonic = time.time(), time.perf_counter()
    while time.perf_counter() - monotonic < 0.05:
        pass
    return time.time() - start > 0.04


CASES = [
    typed_input, read_lines, end_of_input, run_and_capture, run_checked, simple_calls, piped_input, process_object,
    streamed_process, talked_process, ended_process, shell_pipe, script_reads_what_it_wrote, progress_bar, own_process,
    measured_time,
]  # fmt: skip

if __name__ == "__main__":
    base = os.getcwd()
    wanted = sys.argv[1:]
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        os.makedirs(case.__name__)
        os.chdir(case.__name__)
        result = case()
        os.chdir(base)
        print(case.__name__, repr(result))
