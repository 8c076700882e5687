-- An open group: its hash, loaded into a table once in a call, changed there, and saved or ended. Its field `slots` is
-- the slot map, one character a slot:
--   '.'  free
--   'p'  pushed and on its way: in the rollouts stream or with a scorer
--   'u'  usable, with a reward
--   's'  usable, without a reward yet
--   'x'  ended otherwise (failed, cancelled, unscorable ...), and counted as dropped
-- KEYS  open
local MAX_SLOTS = 8192
local MAX_HOLDERS = 200  -- characters of `holders`: from so many on no more are noted, and the group is never withdrawn

local function whole(text)
  return text and #text <= 15 and string.match(text, '^%-?%d+$') and tonumber(text)
end

-- The group's table. `state` is 'open', 'none' (no such group is open), or 'broken': somebody has overwritten its hash.
local function load_group(id, hash)
  local f = redis.pcall('HMGET', hash, 'size', 'slots', 'slot_bytes', 'opened_ms', 'epoch', 'version', 'data_source',
    'holders', 'producer', 'abandoned', 'role')
  local group = {id = id, hash = hash, changes = {}, packets = {}, fields = {}, scores = {}}
  if f.err then
    group.state = 'broken'
    return group
  end
  group.size, group.slot_bytes, group.opened_ms = whole(f[1]), whole(f[3]), whole(f[4])
  group.slots, group.epoch, group.version = f[2] or nil, f[5] or '0', f[6] or ''
  group.data_source, group.holders, group.producer, group.abandoned = f[7] or '', f[8], f[9], f[10]
  group.role = f[11] == 'eval' and 'eval' or 'train'
  local has_map = group.slots and #group.slots <= MAX_SLOTS and not string.find(group.slots, '[^.pusx]')
  if not (f[1] or f[2] or f[3]) then
    group.state = 'none'
  elseif has_map and group.size and group.size > 0 and group.slot_bytes and group.opened_ms and whole(group.epoch)
    and (group.version == '' or whole(group.version)) then
    group.state = 'open'
  else
    group.state = 'broken'
  end
  if not has_map then group.slots = nil end
  return group
end

-- Note a change of the group's hash for `save_group`.
local function change(group, field, value)
  group.changes[#group.changes + 1] = field
  group.changes[#group.changes + 1] = value
end

local function save_group(group)
  if #group.changes > 0 then redis.call('HSET', group.hash, unpack(group.changes)) end
end

-- How many slots have this letter.
local function slots_with(group, letter)
  local _, n = string.gsub(group.slots, letter == '.' and '%.' or letter, '')
  return n
end

-- `text` with letters put at positions `offset + index` of members, whose indices ascend.
local function with_letters(text, offset, members, letter)
  local parts, at = {}, 1
  for _, member in ipairs(members) do
    local position = offset + member.index
    parts[#parts + 1] = string.sub(text, at, position - 1)
    parts[#parts + 1] = letter or member.letter
    at = position + 1
  end
  parts[#parts + 1] = string.sub(text, at)
  return table.concat(parts)
end

-- Nobody has the tickets of the group any more, and nobody has pushed to it. `holders` has the nonces of those calls of
-- `begin` whose callers have its tickets; the field does not exist in a group that was opened otherwise.
local function is_withdrawn(group)
  return group.holders == '' and not string.find(group.slots, '[^.]')
end

-- The producer plays an open group, which counts in pacing (again).
local function play(group, producer)
  if group.abandoned == '1' then
    count('groups_abandoned', -1)
    change(group, 'abandoned', '0')
  end
  if group.producer ~= producer then change(group, 'producer', producer) end
  group.abandoned, group.producer = '0', producer
end
