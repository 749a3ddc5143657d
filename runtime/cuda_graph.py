"""A CUDA graph of a function: the GPU runs all of its kernels after a single launch, instead of one launch per kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from common.errors import UserError, first_line

R = TypeVar("R")


class CUDAGraph:
    """Captures a function without arguments, and replays its kernels.

    A replay reads and writes the memory that the function used during the capture, and repeats its Python numbers. Inputs that
    change must therefore be copied into the same tensors before each replay. A replay writes its results into the tensors that
    `capture` returned.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self, function: Callable[[], R]) -> R:
        """Call `function` on the stream of the capture, where it compiles kernels and allocates the workspaces of libraries."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], R]) -> R:
        """Record the kernels of `function`, without running them. Return the tensors that a replay fills."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection during the capture could free memory of another stream, which invalidates the capture
        try:
            # Other threads pin batches and copy checkpoints at the same time. Only this thread must avoid such calls.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError as e:  # such as too little memory; ending a broken capture raises a second error
            raise UserError(f"the GPU cannot capture a CUDA graph ({first_line(e.__context__ or e)})") from e
        finally:
            torch.cuda.set_stream(current)  # a capture that fails may leave its own stream current
            if collects:
                gc.enable()
        self._graph = graph
        return result

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph. Its memory is free, too, once nothing refers to the tensors that `capture` returned."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
