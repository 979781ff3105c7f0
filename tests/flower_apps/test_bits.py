"""Whole runs of every app: the same bits whether nodes are called together or one by one, on 1 or 2 threads."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from hedgerow.clients.app import BatchClientApp
from tests.flower_apps.cases import APPS, AppCase

ROOT = Path(__file__).parents[2]
