"""Print package versions and the attention kernels that torch chooses on this GPU. The exit code is 1 if a package is missing."""

import subprocess
import sys
from importlib.util import find_spec

PACKAGES = "torch accelerate hydra omegaconf antlr4 pydantic timm torchvision torch_fidelity filelock safetensors scipy PIL tqdm"

if __name__ == "__main__":
    if missing := [name for name in [*PACKAGES.split(), "psutil", "pytest"] if find_spec(name) is None]:
        sys.exit(f"missing packages: {', '.join(missing)}")
    import torch
    import torch.cuda.nccl
    import torch.nn.attention  # defines SDPBackend

    from runtime.machine import choose_kernels

    write = sys.stdout.write
    write(f"- python {sys.version.split()[0]}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}\n")
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.strip().replace("\n", "; ")
        write(f"- NCCL {torch.cuda.nccl.version()}, GPU (driver, clock, highest clock, power): {gpus}\n")
        choose_kernels(torch.device("cuda"), tf32=True)
        for num_tokens in (64, 128, 256):
            q = torch.randn(8, 16, num_tokens, 72, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            choice = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q))
            write(f"- attention of {num_tokens} tokens: {choice.name}\n")
    write("\n")
