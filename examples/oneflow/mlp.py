"""An MLP in OneFlow's mirrored view, with packages/rankless-oneflow: lists with one array for each of two devices."""

import numpy as np
import oneflow as flow
import oneflow.typing as tp

BATCH = 100
DEVICES = 2
PER_DEVICE = BATCH // DEVICES


def mirrored():
    settings = flow.function_config()
    settings.default_data_type(flow.float)
    settings.default_logical_view(flow.scope.mirrored_view())
    return settings


@flow.global_function(type="train", function_config=mirrored())
def train_job(
    images: tp.ListNumpy.Placeholder((PER_DEVICE, 1, 28, 28), dtype=flow.float),
    labels: tp.ListNumpy.Placeholder((PER_DEVICE,), dtype=flow.int32),
) -> tp.ListNumpy:
    start = flow.truncated_normal(0.1)
    rows = flow.reshape(images, [images.shape[0], -1])
    rows = flow.layers.dense(rows, 128, activation=flow.nn.relu, kernel_initializer=start, name="hidden")
    logits = flow.layers.dense(rows, 10, kernel_initializer=start, name="out")
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    flow.optimizer.Adam(flow.optimizer.CosineScheduler(0.003, steps=60)).minimize(loss)
    return loss


if __name__ == "__main__":
    flow.config.gpu_device_num(DEVICES)
    flow.train.CheckPoint().init()
    (train_images, train_labels), _ = flow.data.load_mnist(BATCH)
    for epoch in range(4):
        for images, labels in zip(train_images, train_labels, strict=True):
            parts = [np.split(images, DEVICES), np.split(labels, DEVICES)]
            losses = np.concatenate(train_job(*parts))
        print(f"epoch {epoch}: loss {losses.mean():.5f}")
