"""Memory of inference grows linearly with N; the kernel's own account of the peak, in a fresh process each."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from lineardiff import visual_contrast_attention as vca

def arguments(N):
    q, k, v = (x.transpose(1, 2) for x in torch.randn(1, N, 3, 2, 64).unbind(2))
    pos, neg = torch.randn(2, 1, 2, 64, 64).unbind(0)
    return (q, k, v, pos, neg), dict(lambdas=(torch.tensor(.3), torch.tensor(.4)),
                                     gains=(torch.ones(64), torch.ones(64)), lambda_inits=(.2, .2))

with torch.inference_mode():
    small, options = arguments(256)
    vca(*small, **options)  # what loading the libraries costs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors, options = arguments(int(sys.argv[1]))
    out = vca(*tensors, **options)
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def peak(N):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(N)], capture_output=True, text=True, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in other units elsewhere")
def test_peak_is_bounded_and_linear():
    N, n, heads, d = 16384, 64, 2, 64
    once, twice = peak(N), peak(2 * N)
    qkv_and_out = 4 * heads * N * d * 4
    scores_of_a_chunk = 2 * n * N * 4
    assert once <= 1.5 * qkv_and_out + scores_of_a_chunk
    assert twice <= 2.1 * once
