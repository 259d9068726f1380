"""A model whose ranks differ, as those of a model that draws its own random numbers may."""

from dataclasses import replace

from parrot import SPEC as PARROT

from titanlite.registry import register_model

SPEC = register_model(replace(PARROT, name="odd", build="odd.model:Odd"))
