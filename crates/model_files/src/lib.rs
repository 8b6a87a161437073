//! Small model files for tests, written with the `safetensors` crate's own serializer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nvfp4_checkpoint::{Dtype, Format};
use safetensors::tensor::TensorView;

/// Type, shape and bytes of a tensor.
pub type Content = (Dtype, Vec<usize>, Vec<u8>);

/// Returns a tensor of any type.
pub fn raw(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Content {
    (dtype, shape.to_vec(), bytes.to_vec())
}

/// Returns a tensor of f32.
pub fn f32s(shape: &[usize], numbers: &[f32]) -> Content {
    (Dtype::F32, shape.to_vec(), numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// Returns a vector of i64.
pub fn i64s(numbers: &[i64]) -> Content {
    (Dtype::I64, vec![numbers.len()], numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// Tensors of a file, by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors(BTreeMap<String, Content>);

impl Tensors {
    /// Adds a tensor, or replaces one.
    pub fn set(&mut self, name: impl Into<String>, content: Content) -> &mut Self {
        self.0.insert(name.into(), content);
        self
    }

    /// Returns the tensors with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Content)> {
        self.0.iter().map(|(name, content)| (&name[..], content))
    }

    /// Removes a tensor.
    ///
    /// # Panics
    /// If there is no tensor `name`.
    pub fn remove(&mut self, name: &str) -> &mut Self {
        self.0.remove(name).unwrap_or_else(|| panic!("no tensor {name}"));
        self
    }

    /// Replaces a tensor. `None` removes it.
    pub fn change(&mut self, name: &str, content: Option<Content>) -> &mut Self {
        match content {
            Some(content) => self.set(name, content),
            None => self.remove(name),
        }
    }

    /// Adds an NVFP4 weight `[n, k]` with a global scale of 1/4 and an input scale of 1/2. `seed` determines its bytes.
    pub fn set_nvfp4(&mut self, module: &str, format: Format, [n, k]: [usize; 2], seed: u8) -> &mut Self {
        let bytes = |count: usize, step: u8| -> Vec<u8> {
            (0..count).map(|i| seed.wrapping_add((i as u8).wrapping_mul(step))).collect()
        };
        let scales: Vec<u8> = bytes(n * k / 16, 7).into_iter().map(|code| code % 0x7F).collect();
        let [global, input] = match format {
            Format::ModelOpt => [0.25, 0.5],
            Format::CompressedTensors => [4.0, 2.0],
        };
        self.set(format!("{module}{}", format.values()), raw(Dtype::U8, &[n, k / 2], &bytes(n * k / 2, 13)))
            .set(format!("{module}{}", format.scales()), raw(Dtype::F8_E4M3, &[n, k / 16], &scales))
            .set(format!("{module}{}", format.global()), f32s(&[], &[global]))
            .set(format!("{module}{}", format.input()), f32s(&[1], &[input]))
    }

    /// Adds the experts of a layer, each with a gate, up and down projection. `names` replaces `gate_proj`, `up_proj`,
    /// `down_proj`.
    pub fn set_experts(&mut self, block: &str, names: [&str; 3], format: Format, experts: usize) -> &mut Self {
        for expert in 0..experts {
            for (index, (name, sizes)) in names.iter().zip([[16, 32], [16, 32], [32, 16]]).enumerate() {
                let seed = (3 * expert + index) as u8;
                self.set_nvfp4(&format!("{block}.experts.{expert}.{name}"), format, sizes, seed);
            }
        }
        self
    }

    /// Returns the bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let views = self.0.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).expect("the bytes fit the shape"))
        });
        safetensors::serialize(views, None).expect("the tensors form a valid file")
    }

    /// Writes the file and returns its path.
    pub fn write(&self, path: &Path) -> PathBuf {
        std::fs::write(path, self.to_bytes()).expect("the test's folder is writable");
        path.to_owned()
    }

    /// Distributes the tensors over `shards` files in turn, writes the files and an index, and returns the index's
    /// path.
    pub fn write_sharded(&self, folder: &Path, shards: usize) -> PathBuf {
        let mut files = vec![Self::default(); shards];
        let mut weight_map = BTreeMap::new();
        for (index, (name, content)) in self.0.iter().enumerate() {
            let shard = index % shards;
            files[shard].set(name, content.clone());
            weight_map.insert(name, shard_name(shard, shards));
        }
        for (shard, file) in files.iter().enumerate() {
            file.write(&folder.join(shard_name(shard, shards)));
        }
        let index = folder.join(nvfp4_checkpoint::INDEX_NAME);
        std::fs::write(&index, serde_json::json!({"weight_map": weight_map}).to_string())
            .expect("the test's folder is writable");
        index
    }
}

/// Returns the file name of a shard.
pub fn shard_name(shard: usize, shards: usize) -> String {
    format!("model-{:05}-of-{shards:05}.safetensors", shard + 1)
}

/// Returns a GGUF file of these tensors: name, type, sizes (outermost first), bytes.
pub fn gguf(architecture: &str, tensors: &[(&str, u32, &[usize], Vec<u8>)]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut file =
        [&b"GGUF"[..], &3u32.to_le_bytes(), &(tensors.len() as u64).to_le_bytes(), &2u64.to_le_bytes()].concat();
    file.extend([text("general.architecture"), 8u32.to_le_bytes().into(), text(architecture)].concat());
    file.extend([text("general.file_type"), 4u32.to_le_bytes().into(), 1u32.to_le_bytes().into()].concat());
    let mut data: Vec<u8> = Vec::new();
    for (name, kind, sizes, bytes) in tensors {
        file.extend([text(name), (sizes.len() as u32).to_le_bytes().into()].concat());
        file.extend(sizes.iter().rev().flat_map(|size| (*size as u64).to_le_bytes()));
        file.extend([&kind.to_le_bytes()[..], &(data.len() as u64).to_le_bytes()].concat());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}
