"""Batches of matrices, and Fourier transforms."""

import torch
from operator_cases import batch_last, batch_second, numbers, split
from torch import Tensor

aten = torch.ops.aten


def shifted(x: Tensor) -> Tensor:
    """Return matrices that are positive definite."""
    return x @ x.mT + 4 * torch.eye(x.shape[-1])


def solve(x: Tensor, right: Tensor, left: bool = True) -> Tensor:
    return torch.linalg.solve_ex(x + 4 * torch.eye(3), right, left=left)[0].square()


SPLIT_LINEAR_ALGEBRA = {
    "inverse": split(lambda x: torch.linalg.inv_ex(shifted(x))[0].square(), (3, 3)),
    "Cholesky": split(
        lambda x: (lambda factor: factor + torch.cholesky_solve(x, factor) + torch.cholesky_inverse(factor))(
            torch.linalg.cholesky_ex(shifted(x))[0]
        ).square(),
        (3, 3),
    ),
    "solve": split(lambda x: solve(x, x) + solve(x, x, left=False), (3, 3)),
    "solve of vectors": split(lambda x: solve(x, x[..., 0]), (3, 3)),
    "solve of transposed matrices": split(lambda x: solve(x.mT, x), (3, 3)),
    "solve by one matrix": split(lambda x: solve(numbers(3, 3), x) + solve(x.sum(0), x), (3, 3)),
    "triangular solve": split(
        lambda x: (
            torch.linalg.solve_triangular(shifted(x).tril(), x, upper=False).square()
            + torch.linalg.solve_triangular(numbers(3, 3).tril() + 2 * torch.eye(3), x, upper=False)
        ),
        (3, 3),
    ),
    "triangular solve of the old API": split(lambda x: torch.triangular_solve(x, shifted(x))[0].square(), (3, 3)),
    "right-hand sides": split(
        batch_last(
            lambda x: (
                torch.cholesky_solve(x, shifted(numbers(4, 4))).square()
                + torch.linalg.solve_ex(shifted(numbers(4, 4)), x)[0]
                + torch.linalg.solve_triangular(numbers(4, 4).tril() + 2 * torch.eye(4), x, upper=False)
                + torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(shifted(numbers(4, 4)))[:2], x)
            )
        ),
        (4,),
    ),
    "right-hand sides from the left": split(
        lambda x: torch.linalg.solve_triangular(numbers(4, 4).triu() + 2 * torch.eye(4), x, upper=True, left=False),
        (4,),
    ),
    "determinants": split(lambda x: torch.linalg.det(x).square() + torch.linalg.slogdet(x)[1], (2, 3, 3)),
    "determinants of transposed matrices": split(
        lambda x: torch.linalg.det(x.mT) + torch.linalg.slogdet(x.mT)[1], (3, 3)
    ),
    "determinants of a batch in the middle": split(batch_second(lambda x: torch.linalg.det(x).square()), (2, 3, 3)),
    "determinants of expanded matrices": split(
        lambda x: torch.linalg.det(x[:, None].expand(-1, 2, -1, -1)).square(), (3, 3)
    ),
    "QR and LU": split(
        lambda x: torch.linalg.qr(shifted(x))[1].square() + torch.linalg.lu(shifted(x))[2].square(), (3, 3)
    ),
    "LU factors": split(
        lambda x: (
            torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(shifted(x))[:2], x).square()
            + torch.lu_unpack(*torch.linalg.lu_factor_ex(x)[:2])[2]
        ),
        (3, 3),
    ),
    "singular values": split(lambda x: torch.linalg.svdvals(x) + torch.linalg.svd(x, full_matrices=False)[1], (3, 2)),
    "eigenvalues": split(
        lambda x: torch.linalg.eigvalsh(shifted(x)) + torch.linalg.eigh(shifted(x))[1].abs()[..., 0], (3, 3)
    ),
    "pseudoinverse": split(lambda x: torch.linalg.pinv(x).square(), (3, 2)),
    "matrix exponential": split(lambda x: torch.linalg.matrix_exp(x).square(), (3, 3)),
    "Householder product": split(lambda x: torch.linalg.householder_product(x, x[:, 0]).square(), (3, 3)),
    "cross product": split(
        lambda x: torch.linalg.cross(x, x.cos()).square() + torch.linalg.cross(x, numbers(1, 3)), (3,)
    ),
}
SPLIT_FOURIER = {
    "complex transform": split(lambda x: torch.fft.ifft2(torch.fft.fft2(x) * numbers(4, 4)).real.square(), (4, 4)),
    "real transform": split(lambda x: torch.fft.irfft(torch.fft.rfft(x) * numbers(4)).square()),
    "transform of a batch in the last dim": split(batch_last(lambda x: torch.fft.rfft(x, dim=0, norm="ortho").abs())),
    "windowed transform": split(
        lambda x: torch.stft(x, 4, return_complex=True, window=numbers(4)).abs().square(), (16,)
    ),
}
