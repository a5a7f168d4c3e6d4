"""OneFlow's names of dtypes. A dtype is PyTorch's own."""

import torch

__all__ = ["double", "float", "float16", "float32", "float64", "int8", "int32", "int64", "uint8"]

float16 = torch.float16
float32 = torch.float32
float64 = torch.float64
float = torch.float32
double = torch.float64
int8 = torch.int8
int32 = torch.int32
int64 = torch.int64
uint8 = torch.uint8
