# llmtrain on NVIDIA's PyTorch image, which contains matching builds of torch, NCCL, apex and flash-attn.
#   docker build -t llmtrain . && docker run --gpus all --ipc=host -v "$PWD":/work llmtrain run recipe.yaml
# On AMD's, which contains torch, RCCL and apex; not yet run:
#   docker build -t llmtrain --build-arg IMAGE=rocm/pytorch .
#   docker run --device /dev/kfd --device /dev/dri --group-add video --ipc=host -v "$PWD":/work llmtrain run recipe.yaml
ARG IMAGE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${IMAGE}

# Keep the image's torch. pip would replace it by PyPI's, which does not match the image's libraries. So install all
# dependencies except torch, with the image's torch as a constraint.
WORKDIR /opt/llmtrain
COPY pyproject.toml ./
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
 && python -c "import tomllib; print(*(name for name in tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'] \
    if not name.startswith('torch')), sep='\n')" > /tmp/requirements.txt \
 && PIP_CONSTRAINT=/tmp/torch.txt pip install --no-cache-dir -r /tmp/requirements.txt

COPY . .
RUN PIP_CONSTRAINT=/tmp/torch.txt pip install --no-cache-dir --no-deps . \
 && python -c "import torch; from importlib.util import find_spec as found; \
    assert torch.version.hip or found('amp_C') and found('flash_attn')"

WORKDIR /work
ENTRYPOINT ["llmtrain"]
CMD ["--help"]
