"""``hf-rfa serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from . import options
from .console import errors, starting, warn

MEGABYTE = 2**20


def serve_command(
    model: options.Model,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[str | None, Option(help="The model's name in requests. Default: as the checkpoint.")] = None,
    api_key: Annotated[
        list[str] | None,
        Option(envvar="HF_RFA_API_KEY", help="Key that requests have to bring. May be repeated; sessions are by key."),
    ] = None,
    rows: Annotated[int, Option(min=1, help="Requests that are answered at a time, as rows of one batch.")] = 8,
    max_requests: Annotated[int, Option(min=1, help="Most requests that wait or are answered.")] = 64,
    max_prompt: Annotated[int, Option(min=1, help="Most tokens of a prompt.")] = 1_000_000,
    max_answer: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 4096,
    max_body: Annotated[int, Option(min=1, help="Most bytes of a request.")] = 16 * MEGABYTE,
    session_memory: Annotated[int, Option(min=0, help="MB of memories to keep in the process.")] = 1024,
    session_folder: Annotated[
        Path | None, Option(callback=options.in_a_folder, help="Folder to keep memories in, also for another day.")
    ] = None,
    session_disk: Annotated[int, Option(min=0, help="MB of memories to keep in that folder.")] = 8192,
    grace: Annotated[int, Option(min=0, help="Seconds that answers have to end when the server is stopped.")] = 30,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Serve a converted decoder by OpenAI's interface. Requests share a batch; conversations go on where they were."""
    starting(f"loading {model}")
    try:
        import uvicorn

        from hf_rfa.serving.app import App
    except ImportError as error:
        raise options.UsageError(f"{error}. The server needs: pip install 'hf-rfa[serve]'") from error
    from hf_rfa.inference import load_model
    from hf_rfa.serving.engine import Engine
    from hf_rfa.serving.sessions import Sessions

    loaded, tokenizer = load_model(model, kind="causal", dtype=dtype, device=device)
    sessions = Sessions(loaded, memory=session_memory * MEGABYTE, folder=session_folder, disk=session_disk * MEGABYTE)
    engine = Engine(loaded, tokenizer, sessions, rows=rows, most_requests=max_requests)
    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        warn(f"anybody who reaches {host}:{port} can use this server: pass --api-key.")
    limits = {"most_prompt": max_prompt, "most_answer": max_answer, "most_bytes": max_body}
    app = App(engine, name or model, keys=api_key or (), **limits)
    errors.print(f"serving {app.name} at http://{host}:{port}/v1", soft_wrap=True)
    uvicorn.run(app.asgi, host=host, port=port, timeout_graceful_shutdown=grace, log_level="warning")
