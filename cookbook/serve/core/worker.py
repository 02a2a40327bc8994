"""Runs operations on the backend. Everything here happens on the scheduler's thread."""

from __future__ import annotations

import logging
import re
import shutil
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook.core.clients import SamplingClient, ServiceClient, TrainingClient
from cookbook.core.errors import CookbookError
from cookbook.serve.core.checkpoints import CheckpointKey
from cookbook.serve.core.errors import Gone, InvalidRequest, OperationFailed
from cookbook.serve.core.logprobs import run_forward
from cookbook.serve.core.operations import (
    CreateModel,
    CreateModelFromState,
    Forward,
    Load,
    LoadTokenizer,
    OptimStep,
    Rejected,
    Sample,
    Save,
    Snapshot,
    usage_of,
)
from cookbook.serve.core.sessions import Model, Sampler, Session
from cookbook.serve.core.store import CheckpointRecord, Store
from cookbook.serve.core.tickets import Ticket

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The names of checkpoints; they become part of a folder's name."""

SHARED_SAMPLERS = 8
"""How many base models and checkpoints stay open for sampling; all sessions share them."""


class Worker:
    """The only user of the backend.

    `base_models` maps the names that clients use to the backend's own. `settled` is called with every ticket that was
    settled here, and with the seconds that it ran.
    """

    def __init__(
        self,
        backend: ServiceClient,
        store: Store,
        base_models: Mapping[str, str],
        settled: Callable[[Ticket, float], None],
    ) -> None:
        self._backend, self._store, self._base_models, self._settled = backend, store, base_models, settled
        self._shared: OrderedDict[str, SamplingClient] = OrderedDict()

    def run(self, ticket: Ticket, session: Session) -> None:
        """Run one operation of a model and settle its ticket, whatever happens."""
        started = time.monotonic()
        try:
            session.check_open()
            session.enter("Running")
            result = self._execute(ticket, session)
        except Exception as error:  # reported to the client that asked
            self._fail(ticket, error, started)
        else:
            self._succeed(ticket, result, started)

    def run_samples(self, tickets: Sequence[tuple[Ticket, Session]]) -> None:
        """Run samples as one batch, which the backend can draw together. Each is settled as soon as it is done."""
        started = time.monotonic()
        pending: list[tuple[Ticket, Any]] = []
        for ticket, session in tickets:
            try:
                session.check_open()
                session.enter("Running")
                operation = ticket.operation
                assert isinstance(operation, Sample)
                client = self._sampling_client(session.samplers[ticket.owner], session)
                future = client.sample(
                    operation.prompt,
                    operation.num_samples,
                    operation.params,
                    operation.include_prompt_logprobs,
                    operation.topk_prompt_logprobs,
                )
            except Exception as error:  # reported to the client that asked
                self._fail(ticket, error, started)
            else:
                pending.append((ticket, future))
        for ticket, future in pending:
            future.then(lambda response, ticket=ticket: self._succeed(ticket, response, started))
        for ticket, future in pending:
            try:
                future.result()
            except Exception as error:  # reported to the client that asked
                self._fail(ticket, error, started)

    def _execute(self, ticket: Ticket, session: Session) -> object:
        if isinstance(ticket.operation, LoadTokenizer):
            return self._base_client(ticket.operation.base_model).get_tokenizer()
        model = session.models[ticket.owner]
        match ticket.operation:
            case CreateModel(base_model, rank, alpha, seed, role):
                model.client = self._backend.create_lora_training_client(
                    self._base_models[base_model], rank, alpha, seed, role
                )
                return model.id
            case CreateModelFromState(key, with_optimizer):
                folder = self._store.existing_checkpoint(session.tenant, key).folder
                model.client = self._backend.create_training_client_from_state(folder, with_optimizer)
                return model.id
            case Forward():
                return run_forward(_client(model), ticket.operation, self._backend.capabilities.losses)
            case OptimStep(params):
                return _client(model).optim_step(params).result()
            case Save():
                return self._save(model, session, ticket.operation, ticket.id)
            case Load(key, with_optimizer):
                client, folder = _client(model), self._store.existing_checkpoint(session.tenant, key).folder
                (client.load_state_with_optimizer if with_optimizer else client.load_state)(folder).result()
                return key
            case Snapshot(sampler_id):
                sampler = session.samplers[sampler_id]
                sampler.client = _client(model).save_weights_and_get_sampling_client()
                session.add_snapshot(sampler)
                return sampler_id
            case Rejected(reason):
                raise InvalidRequest(reason)
            case operation:
                raise TypeError(f"{type(operation).__name__} is not an operation of a model")

    def _save(self, model: Model, session: Session, save: Save, ticket_id: str) -> CheckpointKey:
        if not NAME.fullmatch(save.name):
            raise InvalidRequest(
                f"checkpoint name {save.name!r}: must be letters, digits, '.', '_' and '-', at most 128 of them"
            )
        key = CheckpointKey(model.id, save.kind, save.name)
        replaced = self._store.checkpoint(session.tenant, key)
        if replaced is not None and not save.overwrite:
            raise InvalidRequest(key, " exists; save under another name, or with overwrite=true")
        client = _client(model)
        # Every save gets its own folder: an earlier checkpoint of this name stays until the record names the new one.
        number = ticket_id.rpartition(":")[2]
        backend_name = f"{model.id.replace(':', '-')}-{save.name}-{number}"
        saved = (client.save_state if save.kind == "weights" else client.save_weights_for_sampler)(
            backend_name
        ).result()
        folder = Path(saved.path)
        now = time.time()
        record = CheckpointRecord(
            model=model.id,
            kind=save.kind,
            name=save.name,
            tenant=session.tenant,
            folder=saved.path,
            base_model=model.record.base_model,
            rank=model.record.rank,
            bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0,
            created=now,
            expires=None if save.ttl_s is None else now + save.ttl_s,
        )
        self._store.put_checkpoint(record)
        if replaced is not None:
            self._shared.pop(replaced.folder, None)
            shutil.rmtree(replaced.folder, ignore_errors=True)
        return key

    def _sampling_client(self, sampler: Sampler, session: Session) -> SamplingClient:
        if sampler.evicted:
            raise Gone(
                f"sampler {sampler.id} was a snapshot in memory and was replaced by newer ones; "
                "make a new snapshot, or save under a name"
            )
        if sampler.snapshot:
            if sampler.client is None:
                raise InvalidRequest(f"sampler {sampler.id} is not ready; wait for its save_weights_for_sampler first")
            session.use_snapshot(sampler)
            return sampler.client
        if sampler.checkpoint is not None:
            folder = self._store.existing_checkpoint(session.tenant, sampler.checkpoint).folder
            return self._shared_client(folder, lambda: self._backend.create_sampling_client(model_path=folder))
        return self._base_client(sampler.base_model)

    def _base_client(self, base_model: str) -> SamplingClient:
        name = self._base_models[base_model]
        return self._shared_client(f"base:{name}", lambda: self._backend.create_sampling_client(base_model=name))

    def _shared_client(self, key: str, create: Callable[[], SamplingClient]) -> SamplingClient:
        if key not in self._shared:
            self._shared[key] = create()
            if len(self._shared) > SHARED_SAMPLERS:
                self._shared.popitem(last=False)
        self._shared.move_to_end(key)
        return self._shared[key]

    def _succeed(self, ticket: Ticket, result: object, started: float) -> None:
        # Usage is recorded before the client sees the result, so that no result is missing from it.
        kind, usage = type(ticket.operation).__name__, usage_of(ticket.operation, result)
        try:
            self._store.record_usage(ticket.id, ticket.tenant, ticket.session_id, kind, usage)
        except sqlite3.Error as error:
            self._fail(ticket, error, started)
            return
        ticket.usage = usage
        ticket.settle(result)
        self._settled(ticket, time.monotonic() - started)

    def _fail(self, ticket: Ticket, error: Exception, started: float) -> None:
        if ticket.future.done():
            return
        if not isinstance(error, CookbookError):
            logger.exception("operation %s (%s) failed", ticket.id, type(ticket.operation).__name__)
            error = OperationFailed(_explain(error))
        ticket.settle(error=error)
        self._settled(ticket, time.monotonic() - started)


def _client(model: Model) -> TrainingClient:
    if model.client is None:
        raise InvalidRequest(
            f"model {model.id} could not be created; see the error of its creation, and create another"
        )
    return model.client


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"out of memory; the operation had no effect and the session is usable: send less data at once ({text})"
    return f"{type(error).__name__}: {text}; the operation had no effect and the session is usable"
