"""LeNet in OneFlow's style, with packages/rankless-oneflow: on devices and machines of your choice."""

import argparse

import numpy as np
import oneflow as flow
import oneflow.typing as tp

BATCH = 100


def lenet(images):
    start = flow.truncated_normal(0.1)
    hidden = images
    for number, filters in enumerate((16, 32), start=1):
        hidden = flow.layers.conv2d(
            hidden,
            filters,
            5,
            padding="SAME",
            activation=flow.nn.relu,
            kernel_initializer=start,
            name=f"conv{number}",
        )
        hidden = flow.nn.max_pool2d(hidden, 2, 2, "SAME")
    rows = flow.reshape(hidden, [hidden.shape[0], -1])
    rows = flow.layers.dense(rows, 128, activation=flow.nn.relu, kernel_initializer=start, name="hidden")
    rows = flow.nn.dropout(rows, rate=0.5)
    return flow.layers.dense(rows, 10, kernel_initializer=start, name="out")


@flow.global_function(type="train")
def train_job(
    images: tp.Numpy.Placeholder((BATCH, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH,), dtype=flow.int32),
) -> tp.Numpy:
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, lenet(images))
    rates = flow.optimizer.PiecewiseConstantScheduler([60], [0.1, 0.02])
    flow.optimizer.SGD(rates, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict")
def classify(images: tp.Numpy.Placeholder((BATCH, 1, 28, 28), dtype=flow.float)) -> tp.Numpy:
    return flow.nn.softmax(lenet(images))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="on each machine")
    parser.add_argument("--machines", nargs="+", default=[], help="start the script on each of these addresses")
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    flow.config.gpu_device_num(arguments.devices)
    flow.env.ctrl_port(9988)
    if arguments.machines:
        flow.env.machine([{"addr": address} for address in arguments.machines])
    check_point = flow.train.CheckPoint()
    check_point.init()
    (train_images, train_labels), (test_images, test_labels) = flow.data.load_mnist(BATCH, BATCH)
    for epoch in range(arguments.epochs):
        losses = [train_job(images, labels).mean() for images, labels in zip(train_images, train_labels, strict=True)]
        print(f"epoch {epoch}: loss {np.mean(losses):.5f}")
    right = [
        (classify(images).argmax(1) == labels).mean() for images, labels in zip(test_images, test_labels, strict=True)
    ]
    print(f"test accuracy {np.mean(right):.2%}")
    check_point.save("lenet")
