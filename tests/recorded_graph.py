"""A stand-in on the CPU for a CUDA graph. Like a real one, it freezes addresses and Python numbers."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Records every operation of a function, and repeats the operations on the same tensors and with the same numbers.

    It has the methods of `runtime.cuda_graph.CUDAGraph`. A real capture computes nothing, so the results of this one become NaN
    until the first replay.
    """

    def __init__(self, device):
        super().__init__()
        self.calls, self.tensors = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        draws = torch.Tag.nondeterministic_seeded in function.tags and "attention" not in function.name()  # without dropout
        assert not draws, f"{function} draws random numbers inside the graph"
        assert function is not torch.ops.aten.lift_fresh.default, "a tensor is made of Python numbers inside the graph"
        self.calls.append((function, args, kwargs or {}, function(*args, **kwargs or {})))
        return self.calls[-1][-1]

    def warm_up(self, function):
        return function()

    def capture(self, function):
        with self:
            results = function()
        for result in results:
            result.fill_(torch.nan)
        self.tensors = [weakref.ref(result) for result in results]
        return results

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, results in self.calls:
            for old, new in zip(tree_leaves(results), tree_leaves(function(*args, **kwargs))):
                if old is not new and old.data_ptr() != new.data_ptr():  # not an operation in place, and not a view
                    old.copy_(new)

    def reset(self):
        self.calls = []
