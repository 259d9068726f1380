"""A model whose ranks do not agree, as one that draws its own random numbers may not."""

from dataclasses import replace

from parrot import SPEC as PARROT

from titanlite.registry import register_model

SPEC = register_model(replace(PARROT, name="odd", build="odd.model:Odd"))
