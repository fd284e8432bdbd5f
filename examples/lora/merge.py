"""Adds an adapter to the model it was trained beside: merge.py MODEL ADAPTER OUT"""

import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM

model, adapter, out = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(model)
PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(out)
