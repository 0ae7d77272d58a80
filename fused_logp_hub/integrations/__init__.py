"""Drop-ins for the log-probability functions of TRL, verl and OpenRLHF.

Each module has functions with the signatures and results of the package it is named after, and ``patch``, which
swaps them into the installed package and out again::

    from fused_logp_hub import integrations

    with integrations.trl.patch:
        trainer.train()

Importing this needs none of the three packages.
"""

from fused_logp_hub.integrations import openrlhf, trl, verl
from fused_logp_hub.integrations._patch import Patch

__all__ = ["Patch", "openrlhf", "trl", "verl"]
