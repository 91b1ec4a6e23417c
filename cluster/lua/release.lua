-- A checkpoint covers the steps up to one: delete the payload of their groups.
-- Keys: group:<id> hash, trajectory:<id> hash, live set, gone sets, stats hash.
-- ARGV: step, groups ...
-- Returns how many groups were deleted. Groups that are not trained are left alone.
local deleted = 0
for i = 2, #ARGV do
  if call('HGET', key('group', ARGV[i]), 'state') == 'trained' then
    erase(ARGV[i])
    deleted = deleted + 1
  end
end
local before = tonumber(call('HGET', base .. 'stats', 'released') or 0)
if tonumber(ARGV[1]) > before then call('HSET', base .. 'stats', 'released', ARGV[1]) end
return deleted
