"""A session pod as the gateway sees it: the wire of one incarnation over a ledger that outlives it.

    fake_pod.py IP POD_UID TOKEN LEDGER

The ledger is a JSON-lines file that stands for the journal: what is in it was accepted, by whichever pod. A test
steers the pod by POST /_mode with {"mode": MODE}: "serve"; "hold" (accepts, but nothing gets done); "fenced" (421);
"stranger" (the address belongs to another workload now, which answers 404); "large" (results of LARGE bytes).
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.machinery
import importlib.util
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

PROTOBUF = "application/x-protobuf"
LARGE = 8 << 20


def wire_schema() -> Any:
    """The SDK's generated protobuf module, without the SDK, whose import takes seconds."""
    package = importlib.util.find_spec("tinker")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "proto", "tinker_public_pb2.py")
    loader = importlib.machinery.SourceFileLoader("tinker_public_pb2", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


KEY, FILE, ARCHIVE = "1-4", "adapter_model.safetensors", "checkpoint.tar"
CONTENT = random.Random(7).randbytes(1_500_000)
"""Of the only file of every model's external weights."""


class Ledger:
    """Accepted operations, and every call that came in, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**record, "time": time.time()}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def find(self, request_id: str) -> dict[str, Any] | None:
        return next((r for r in self.read() if r.get("accepted") == request_id), None)


class File(FileResponse):
    """A file of a pod; whatever comes of the request, the answer has the pod's name on it."""

    def __init__(self, path: Path, uid: str) -> None:
        super().__init__(path)
        self._uid = uid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-everloop-pod-uid"] = self._uid
            await send(message)

        await super().__call__(scope, receive, signed)


class Pod:
    def __init__(self, uid: str, token: str, ledger: Ledger) -> None:
        self.uid, self.token, self.ledger, self.mode = uid, token, ledger, "serve"
        self.schema = wire_schema()

    async def set_mode(self, request: Request) -> Response:
        self.mode = (await request.json())["mode"]
        return JSONResponse({})

    async def call(self, request: Request) -> Response:
        if self.mode == "stranger":
            return JSONResponse({"detail": "no such page"}, 404)
        answer = await self.answer(request)
        answer.headers["x-everloop-pod-uid"] = self.uid
        return answer

    async def answer(self, request: Request) -> Response:
        method = request.url.path.rpartition("/")[2]
        body = await request.body()
        stand_ins = request.headers.get("x-everloop-stand-ins")
        weights = request.headers.get("x-everloop-weights")
        key = request.headers.get("x-everloop-key")
        self.ledger.write(call=method, pod=self.uid, weights=weights, stand_ins=stand_ins, key=key)
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"detail": "token"}, 401)
        if request.headers.get("x-everloop-pod-uid") != self.uid or self.mode == "fenced":
            return JSONResponse({"detail": "fenced"}, 421)
        if method == "retrieve_future":
            return await self.retrieve(json.loads(body)["request_id"])
        if method == "retrieve_futures":
            return self.completions(json.loads(body)["target"]["sampling_session_id"])
        if method == "cancel_future":
            self.ledger.write(cancelled=json.loads(body)["request_id"], pod=self.uid)
            return JSONResponse({})
        if method == "get_info":
            return self.info(json.loads(body)["model_id"])
        if request.method == "GET" and "/files" in request.url.path:
            return self.file(request)
        if "/checkpoints/" in request.url.path:
            return await self.change(request, body)
        if request.method == "GET":
            return self.listing(request.url.path.removeprefix("/api/v1/").split("/"))
        if method == "copy_weights":
            return await self.copy(request, json.loads(body))
        if method == "weights_info":
            return JSONResponse({"base_model": "org/small", "is_lora": True, "lora_rank": 8, "train_mlp": True})
        stream, number, extra = self.identify(method, body, request.headers.get("x-everloop-weights"))
        request_id = f"{stream}:{number}"
        if self.ledger.find(request_id) is None:
            self.ledger.write(accepted=request_id, method=method, pod=self.uid, extra=extra)
        ids = {"sample_sequence_ids": [f"{request_id}:0"]} if method == "asample" else {}
        return JSONResponse({"request_id": request_id, **ids})

    def file(self, request: Request) -> Response:
        """The files of external weights, or their names; one that is held comes to the half, and no further."""
        *_, key, name = request.url.path.split("/")
        if name == "files":
            return JSONResponse({"key": KEY, "files": [FILE if "/external_weights/" in request.url.path else ARCHIVE]})
        self.ledger.write(file=name, pod=self.uid, range=request.headers.get("range"))
        if key != KEY or name not in (FILE, ARCHIVE):
            return JSONResponse({"detail": "file"}, 404)
        path = self.ledger.path.with_suffix(".file")
        if not path.exists():
            path.write_bytes(CONTENT)
        if self.mode != "hold":
            return File(path, self.uid)

        async def half() -> AsyncIterator[bytes]:
            yield CONTENT[: len(CONTENT) // 2]
            await asyncio.sleep(30)

        return StreamingResponse(half(), headers={"content-length": str(len(CONTENT))})

    async def change(self, request: Request, body: bytes) -> Response:
        """Of a checkpoint; while nothing gets done, it is not answered either."""
        path = request.url.path.removeprefix("/api/v1/training_runs/")
        told = {"method": request.method, "body": body.decode(), "repeat": request.headers.get("x-idempotency-key")}
        self.ledger.write(changed=path, pod=self.uid, **told)
        if self.mode == "hold":
            await asyncio.sleep(30)
        return JSONResponse({})

    async def copy(self, request: Request, asked: dict[str, Any]) -> Response:
        """Of a checkpoint: each run once, and for whoever may read the source."""
        run, source = f"{asked['session_id']}:train:{asked['model_seq_id']}", asked["source_path"]
        known = any(record.get("copied") == run for record in self.ledger.read())
        self.ledger.write(asked_to_copy=run, pod=self.uid, body=asked)
        if not known and request.headers.get("x-everloop-weights") != source:
            return JSONResponse({"detail": "source_path"}, 404)
        if not known:
            self.ledger.write(copied=run, source=source, pod=self.uid)
        if self.mode == "hold":
            await asyncio.sleep(30)
        return JSONResponse({"tinker_path": f"tinker://{run}/{source.split('/', 3)[3]}"})

    def identify(self, method: str, body: bytes, allowed: str | None) -> tuple[str, int, dict[str, Any]]:
        if method == "forward_backward":
            message = self.schema.ForwardBackwardRequest.FromString(body)
            return message.model_id, message.seq_id, {"datums": len(message.data)}
        value = json.loads(body)
        if method == "create_model":
            return f"{value['session_id']}:train:{value['model_seq_id']}", 0, {"base_model": value["base_model"]}
        if method == "load_weights":
            extra = {"path": value["path"], "allowed": allowed}
            if "session_id" in value:
                return f"{value['session_id']}:train:{value['model_seq_id']}", 0, {"base_model": "org/small", **extra}
            return value["model_id"], value["seq_id"], extra
        if method == "asample":
            return value["sampling_session_id"], value["seq_id"], {}
        return value["model_id"], value["seq_id"], {"sampler": value.get("sampling_session_seq_id")}

    def listing(self, path: list[str]) -> Response:
        runs, checkpoints, public = [], list[dict[str, Any]](), dict[str, bool]()
        for record in self.ledger.read():
            if record.get("changed", "").endswith("/publish"):
                public[record["changed"].removesuffix("/publish")] = record["method"] == "POST"
            model = record.get("accepted", "").rpartition(":")[0]
            time = datetime.datetime.fromtimestamp(record["time"], datetime.UTC).isoformat()
            if record.get("method") == "create_model":
                run = {"training_run_id": model, "base_model": "org/small", "is_lora": True}
                runs.append({**run, "last_request_time": time})
            elif record.get("method") == "save_weights":
                saved = {"checkpoint_id": "weights/saved", "checkpoint_type": "training", "time": time}
                checkpoints.append({**saved, "tinker_path": f"tinker://{model}/weights/saved"})
            elif record.get("method") == "save_weights_external":
                saved = {"checkpoint_id": "external_weights/out", "checkpoint_type": "external", "time": time}
                checkpoints.append({**saved, "tinker_path": f"tinker://{model}/external_weights/out"})
        for one in checkpoints:
            place = str(one["tinker_path"]).removeprefix("tinker://").replace("/", "/checkpoints/", 1)
            one["public"] = public.get(place, False)
        match path:
            case ["sessions"]:
                return JSONResponse({"sessions": [session_of(run, checkpoints) for run in runs]})
            case ["training_runs"]:
                return JSONResponse({"training_runs": runs})
            case ["training_runs", wanted]:
                found = [run for run in runs if run["training_run_id"] == wanted]
                return JSONResponse(found[0]) if found else JSONResponse({"detail": f"training_run_id {wanted}"}, 404)
            case ["training_runs", wanted, "checkpoints"]:
                checkpoints = [one for one in checkpoints if f"//{wanted}/" in one["tinker_path"]]
        return JSONResponse({"checkpoints": checkpoints, "cursor": None})

    def info(self, model_id: str) -> Response:
        created = self.ledger.find(f"{model_id}:0")
        if created is None:
            return JSONResponse({"detail": f"model_id {model_id}"}, 404)
        name = created["extra"]["base_model"]
        return JSONResponse({"model_id": model_id, "model_data": {"model_name": name}, "lora_rank": 8, "is_lora": True})

    async def retrieve(self, request_id: str) -> Response:
        give_up = time.monotonic() + 30
        while self.mode == "hold" and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        operation = self.ledger.find(request_id)
        if operation is None:
            return JSONResponse({"detail": f"request_id {request_id}"}, 410)
        if self.mode == "large":
            return Response(bytes(LARGE), media_type=PROTOBUF)
        if self.mode == "hold":
            return JSONResponse({"queue_state": "active"}, 408)
        if self.mode == "fenced":
            return JSONResponse({"detail": "fenced"}, 421)
        self.ledger.write(delivered=request_id, pod=self.uid)
        return self.result(operation, request_id.rpartition(":")[0])

    def completions(self, sampler: str) -> Response:
        accepted = [r["accepted"] for r in self.ledger.read() if r.get("accepted", "").startswith(f"{sampler}:")]
        completions = [{"state": "finished", "request_id": request} for request in accepted]
        return JSONResponse({"completions": completions, "cursor": len(accepted)})

    def result(self, operation: dict[str, Any], stream: str) -> Response:
        method, extra = operation["method"], operation["extra"]
        if method == "forward_backward":
            output = self.schema.ForwardBackwardOutput(loss_fn_output_type="none")
            output.metrics["loss:sum"] = 1.5
            record = output.loss_fn_outputs.add()
            record.num_datums = extra["datums"]
            return Response(output.SerializeToString(), media_type=PROTOBUF)
        if method == "asample":
            answer = self.schema.SampleResponse()
            answer.sequences.add(stop_reason=1, tokens=b"\x07\0\0\0", logprobs=b"\0\0\0\0")
            return Response(answer.SerializeToString(), media_type=PROTOBUF)
        if method == "create_model":
            return JSONResponse({"model_id": stream})
        if method == "load_weights" and extra["allowed"] != extra["path"]:
            return JSONResponse({"error": f"path: {extra['path']}", "category": "user"})
        if method == "load_weights":
            return JSONResponse({"path": extra["path"], "model_id": stream, "type": "load_weights"})
        if method == "optim_step":
            return JSONResponse({"metrics": {}})
        if extra["sampler"] is not None:
            return JSONResponse({"sampling_session_id": f"{stream.partition(':')[0]}:sample:{extra['sampler']}"})
        return JSONResponse({"path": f"tinker://{stream}/weights/saved"})


def session_of(run: dict[str, Any], checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    """The client's session of a run, if it has no other."""
    model = str(run["training_run_id"])
    own = sum(f"//{model}/" in one["tinker_path"] for one in checkpoints)
    session, created = model.partition(":")[0], run["last_request_time"]
    samplers = [f"{session}:sample:0"]
    return {"session_id": session, "created": created, "models": [model], "samplers": samplers} | {
        "checkpoints": own,
        "bytes": 10 * own,
    }


def main() -> None:
    ip, uid, token, ledger = sys.argv[1:]
    pod = Pod(uid, token, Ledger(Path(ledger)))
    routes = [
        Route("/_mode", pod.set_mode, methods=["POST"]),
        Route("/api/v1/{rest:path}", pod.call, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    uvicorn.run(Starlette(routes=routes), host=ip, port=8080, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
