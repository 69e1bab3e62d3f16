"""A toy MCP server over standard input and output for tests: the handshake is its own, the answers are the test's."""
import textwrap

HANDSHAKE = '''
import json, sys

def serve(answer):
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        params = message.get("params") or {}
        if message["method"] == "initialize":
            result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                      "serverInfo": {"name": "toy", "version": "1"}}
        else:
            result = answer(message["method"], params)
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
'''


def server(body: str) -> str:
    """The program of a server; `body` is source that calls `serve` with a function of a request's method and params."""
    return HANDSHAKE + textwrap.dedent(body)
