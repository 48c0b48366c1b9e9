# llmtrain on NVIDIA's PyTorch image, which brings torch, NCCL, apex and flash-attn that were built for each other.
#   docker build -t llmtrain . && docker run --gpus all --ipc=host -v "$PWD":/work llmtrain run recipe.yaml
FROM nvcr.io/nvidia/pytorch:26.05-py3

# The image's torch must stay: its version is a pre-release of NVIDIA's, which pip would replace by PyPI's, and apex
# and flash-attn would no longer fit. So everything but torch is installed, with the image's torch as a constraint.
WORKDIR /opt/llmtrain
COPY pyproject.toml ./
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
 && python -c "import tomllib; print(*(name for name in tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'] \
    if not name.startswith('torch')), sep='\n')" > /tmp/requirements.txt \
 && PIP_CONSTRAINT=/tmp/torch.txt pip install --no-cache-dir -r /tmp/requirements.txt

COPY . .
RUN PIP_CONSTRAINT=/tmp/torch.txt pip install --no-cache-dir --no-deps . \
 && python -c "from importlib.util import find_spec; assert find_spec('amp_C') and find_spec('flash_attn')"

WORKDIR /work
ENTRYPOINT ["llmtrain"]
CMD ["--help"]
