# llmtrain on NVIDIA's PyTorch image, which contains matching builds of torch, NCCL, apex and flash-attn.
#   docker build -t llmtrain . && docker run --gpus all --ipc=host -v "$PWD":/work llmtrain run recipe.yaml
FROM nvcr.io/nvidia/pytorch:26.05-py3

# Keep the image's torch. It is a pre-release by NVIDIA; pip would replace it by PyPI's, which does not match the image's
# apex and flash-attn. So install all dependencies except torch, with the image's torch as a constraint.
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
