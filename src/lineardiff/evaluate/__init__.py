"""What a model is worth: accuracy, size and cost, speed."""

from lineardiff.evaluate.accuracy import accuracy, predict
from lineardiff.evaluate.flops import multiply_adds, parameters
from lineardiff.evaluate.paired import agreement, paired_difference
from lineardiff.evaluate.speed import Speed, images_per_second
