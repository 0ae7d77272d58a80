"""What to do about an error code of the CUDA driver; the same for every call that returns it."""

from __future__ import annotations

_DOCTOR = "Run `fused-logp-hub doctor`."
_CAPTURE = "Call fused_logp_hub.preload() before capturing a graph."
_MPS = "Look at this node's MPS daemon, or unset CUDA_MPS_PIPE_DIRECTORY."
_REINSTALL = "Reinstall fused-logp-hub; if it stays, report this as a bug."

_BY_CODE = {
    2: "Free memory on this GPU.",
    3: "CUDA does not survive a fork: start processes by spawn, or use CUDA in them only.",
    34: "This libcuda.so.1 is the toolkit's stub, for linking only: take its folder off LD_LIBRARY_PATH.",
    46: "Another process holds this GPU exclusively: end it, or use another GPU.",
    100: "Check CUDA_VISIBLE_DEVICES, and that this container was started with GPUs.",
    101: "Use an index below the number of visible GPUs.",
    200: _REINSTALL,
    209: _REINSTALL,
    700: "An earlier kernel of this process failed, perhaps another library's: run it under compute-sanitizer.",
    719: "An earlier kernel of this process failed, perhaps another library's: run it under compute-sanitizer.",
    802: "Start the fabric manager (nvidia-fabricmanager) of this node.",
    803: (
        "libcuda.so.1 is of another release than the kernel module: take a cuda-compat folder off LD_LIBRARY_PATH, "
        "or reboot after a driver's update."
    ),
    804: (
        "Forward compatibility (cuda-compat) exists for data-center GPUs only: take its folder off LD_LIBRARY_PATH, "
        "or update the driver."
    ),
    805: _MPS,
    806: _MPS,
    807: _MPS,
    **dict.fromkeys(range(900, 909), _CAPTURE),
}


def advice(code: int) -> str:
    """One sentence that ends an error message."""
    return _BY_CODE.get(code, _DOCTOR)
