"""The network, and a worker that trains it: a Keras model whose weights live on servers."""

import argparse

import keras
import tensorflow as tf
from images import digits

import shoal.server


def network():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")]
    )


def variables(model):
    """Servers know them by name, and as numpy arrays."""
    return {variable.path: variable for variable in model.trainable_variables}


def adopt(model, values):
    for name, variable in variables(model).items():
        variable.assign(values[name])


def train(client, model, images, labels, *, steps, batch_size):
    loss = keras.losses.SparseCategoricalCrossentropy()
    names, trained = zip(*variables(model).items(), strict=True)

    @tf.function
    def gradients(images, labels):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images))
        return tape.gradient(value, [variable.value for variable in trained])

    values = client.pull()
    while client.step < steps:
        adopt(model, values)
        at = (client.step * batch_size) % (len(images) - batch_size + 1)
        found = gradients(images[at : at + batch_size], labels[at : at + batch_size])
        values = client.push({name: gradient.numpy() for name, gradient in zip(names, found, strict=True)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    for name in ("worker", "workers", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--data", default="")
    given = parser.parse_args()
    images, labels = digits(given.data, "train")
    mine = slice(given.worker, None, given.workers)
    with shoal.server.connect(given.address, worker=given.worker) as client:
        train(client, network(), images[mine], labels[mine], steps=given.steps, batch_size=64)
