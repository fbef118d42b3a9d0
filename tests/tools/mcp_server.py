"""An MCP server to test against: over standard input and output, or as an HTTP application."""

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("test", log_level="ERROR")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(name="keep.note")
def note(text: str) -> str:
    """Keeps a note."""
    notes.append(text)
    return ",".join(notes)


@server.tool()
def process() -> str:
    """Tells who runs this."""
    return str(os.getpid())


@server.tool()
def child() -> str:
    """Starts a process of its own."""
    return str(subprocess.Popen(["sleep", "300"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid)


@server.tool()
def environment(name: str) -> str:
    """Reads a variable."""
    return os.environ.get(name, "not set")


@server.tool()
def fail(how: str) -> str:
    """Fails."""
    if how == "die":
        print("about to die: sk-ABCDEFGHIJKLMNOPQRST /home/secret/path \x1b]0;x\x07", file=sys.stderr, flush=True)
        os._exit(3)
    raise ValueError("no /home/someone/secret.txt")


@server.tool()
def sleep(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def much(size: int) -> str:
    """Gives a long text."""
    return "x" * size


@server.tool()
def picture() -> Image:
    """Draws."""
    return Image(data=b"\x89PNG" + b"\0" * 96, format="png")


if __name__ == "__main__":
    if "slow" in sys.argv:
        time.sleep(3600)
    if "broken" in sys.argv:
        raise SystemExit("this server does not start")
    if "deaf" in sys.argv:  # goes on when its input is closed
        try:
            server.run()
        finally:
            time.sleep(60)
    server.run()
